/*
  route_picture.h: how a routing looks: on the terminal and as SVG. What is counted is in route.h. Include route.h and
  svg.h first.
*/
#ifndef ROUTE_PICTURE_H
#define ROUTE_PICTURE_H

/* The co-activation of groups of neighbouring experts, so that a picture has at most `most` rows; a group's cell is the mean of
   its experts' pairs. Returns the rows, and how many experts each stands for. */
static uint32_t route_shrink(const routing *r, uint32_t most, double *cells, uint32_t *each) {
    const size_t e = r->num_experts;
    uint32_t rows, a, b, i, j;
    *each = (r->num_experts + most - 1) / most;
    rows = (r->num_experts + *each - 1) / *each;
    for (a = 0; a < rows; a++)
        for (b = 0; b < rows; b++) {
            double sum = 0, count = 0;
            for (i = a * *each; i < (a + 1) * *each && i < e; i++)
                for (j = b * *each; j < (b + 1) * *each && j < e; j++)
                    if (i != j) {
                        sum += r->together[i * e + j];
                        count++;
                    }
            cells[a * rows + b] = count > 0 ? sum / count : 0;
        }
    return rows;
}

static double route_largest(const double *values, size_t count) {
    double largest = 0;
    size_t i;
    for (i = 0; i < count; i++)
        if (values[i] > largest) largest = values[i];
    return largest;
}

/* ---- the terminal ---- */

static void route_print_bars(const routing *r) {
    static const char *const blocks[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
    static const char ascii[] = " .:-=+*#@";
    const int unicode = output_is_unicode();
    uint32_t e;
    printf("\nTokens per expert: mean %.1f, most %u; experts without any: %u of %u; effective experts, by entropy: %.1f\n",
           r->mean, (unsigned)r->most, (unsigned)r->unused, (unsigned)r->num_experts, r->effective);
    for (e = 0; e < r->num_experts; e++) {
        const unsigned level = r->most ? (unsigned)((8.0 * r->tokens[e] + r->most - 1) / r->most) : 0;
        if (e % 64 == 0) printf("%s%6u  ", e ? "\n" : "", (unsigned)e);
        if (unicode) fputs(blocks[level > 8 ? 8 : level], stdout);
        else putchar(ascii[level > 8 ? 8 : level]);
    }
    putchar('\n');
}

static void route_print_together(const routing *r) {
    static const char *const shades[] = {"  ", "░░", "▒▒", "▓▓", "██"};
    static const char *const ascii[] = {"  ", "..", "::", "**", "##"};
    static double cells[32 * 32];
    const int unicode = output_is_unicode();
    uint32_t each, a, b;
    const uint32_t rows = route_shrink(r, 32, cells, &each);
    const double most = route_largest(cells, (size_t)rows * rows);
    if (r->top_k < 2) return;
    printf("\nChosen together%s; most often", each > 1 ? " (neighbours taken together)" : "");
    for (a = 0; a < r->num_pairs && a < 4; a++)
        printf("%s %u and %u (%u tokens)", a ? "," : "", (unsigned)r->pairs[a].a, (unsigned)r->pairs[a].b,
               (unsigned)r->pairs[a].tokens);
    printf("%s\n", r->num_pairs ? "" : " none");
    for (a = 0; a < rows; a++) {
        printf("%6u  ", (unsigned)(a * each));
        for (b = 0; b < rows; b++) {
            const unsigned level = most > 0 ? (unsigned)(4 * sqrt(cells[a * rows + b] / most) + 0.5) : 0;
            fputs(unicode ? shades[level > 4 ? 4 : level] : ascii[level > 4 ? 4 : level], stdout);
        }
        putchar('\n');
    }
}

static void route_print(const routing *r) {
    uint32_t i, j;
    printf("%s: %u tokens, %u experts, top-%u\n", r->source, (unsigned)r->num_tokens, (unsigned)r->num_experts,
           (unsigned)r->top_k);
    for (i = 0; i < r->num_tokens && i < 4; i++) {
        printf("  token %-4u ", (unsigned)i);
        for (j = 0; j < r->top_k; j++) {
            printf(" %d", (int)r->ids[(size_t)i * r->top_k + j]);
            if (r->weights) printf(":%.4f", (double)r->weights[(size_t)i * r->top_k + j]);
        }
        printf("\n");
    }
    if (r->num_tokens > 4) printf("  ... all of them by --text, --csv or --json\n");
    route_print_bars(r);
    route_print_together(r);
    printf("\nDistinct experts of consecutive tokens\n   batch  distinct  of %-5u uniform routing\n", (unsigned)r->num_experts);
    for (i = 0; i < r->num_batches; i++)
        printf("%8u %9.1f %7.0f%% %9.1f\n", (unsigned)r->batches[i], r->distinct[i], 100 * r->distinct[i] / r->num_experts,
               r->uniform[i]);
}

/* ---- SVG ---- */

static void route_draw_bars(svg *s, const routing *r, const plot *p) {
    const double step = p->width / r->num_experts, gap = step > 3 ? 1 : 0;
    uint32_t e;
    char tip[96];
    plot_frame(s, p, "Tokens per expert", "expert", "tokens", 1);
    for (e = 0; e < r->num_experts; e++) {
        const double x = plot_x(p, e - 0.5), y = plot_y(p, r->tokens[e]);
        snprintf(tip, sizeof tip, "expert %u: %u tokens", (unsigned)e, (unsigned)r->tokens[e]);
        if (r->tokens[e]) svg_rect(s, "f0", x, y, step - gap, p->top + p->height - y, 1, tip);
    }
    svg_line(s, "line dashed floor", p->left, plot_y(p, r->mean), p->left + p->width, plot_y(p, r->mean));
    svg_text(s, "label floortext", "start", p->left + p->width + 10, plot_y(p, r->mean) + 4, "mean %.1f", r->mean);
}

/* How dark a part of the largest count is: by its square root, since a few pairs are far ahead of the others. */
static double route_shade(double part) { return 0.03 + 0.97 * sqrt(part); }

static void route_draw_together(svg *s, const routing *r, double left, double top, double size) {
    static double cells[64 * 64];
    uint32_t each, a, b, i;
    const uint32_t rows = route_shrink(r, 64, cells, &each);
    const double most = route_largest(cells, (size_t)rows * rows), step = size / rows;
    const uint32_t tick = (uint32_t)plot_step(r->num_experts, 8, 1);
    svg_text(s, "panel ink", "start", left, top - 30, "Experts chosen together");
    if (each > 1)
        svg_text(s, "soft", "start", left, top - 12, "mean over the pairs of %u x %u experts", (unsigned)each, (unsigned)each);
    else svg_text(s, "soft", "start", left, top - 12, "tokens that chose both");
    svg_rect(s, "empty", left, top, step * rows, step * rows, 1, NULL);
    for (a = 0; a < rows; a++)
        for (b = 0; b < rows; b++) {
            char tip[128];
            if (!(cells[a * rows + b] > 0)) continue;
            if (each == 1)
                snprintf(tip, sizeof tip, "experts %u and %u: %.0f tokens", (unsigned)a, (unsigned)b, cells[a * rows + b]);
            else
                snprintf(tip, sizeof tip, "experts %u to %u and %u to %u: %.3g tokens a pair", (unsigned)(a * each),
                         (unsigned)((a + 1) * each - 1), (unsigned)(b * each), (unsigned)((b + 1) * each - 1),
                         cells[a * rows + b]);
            svg_rect(s, "f0", left + b * step, top + a * step, step, step, route_shade(cells[a * rows + b] / most), tip);
        }
    for (i = 0; i < r->num_experts; i += tick) {
        const double at = (i + 0.5) * step / each;
        svg_text(s, "soft", "middle", left + at, top + size + 18, "%u", (unsigned)i);
        svg_text(s, "soft", "end", left - 8, top + at + 4, "%u", (unsigned)i);
    }
    svg_text(s, "soft", "middle", left + size / 2, top + size + 36, "expert");
    for (i = 0; i < 40; i++)
        svg_rect(s, "f0", left + size + 18, top + size - (i + 1) * size / 80, 12, size / 80 + 0.3, route_shade((i + 0.5) / 40),
                 NULL);
    svg_text(s, "soft", "start", left + size + 36, top + size, "0");
    svg_text(s, "soft", "start", left + size + 36, top + 0.75 * size + 4, "%.3g", most / 2);
    svg_text(s, "soft", "start", left + size + 36, top + size / 2 + 8, "%.3g", most);
}

static void route_draw_distinct(svg *s, const routing *r, const plot *p) {
    double x[ROUTE_BATCHES_MAX];
    plot_label labels[2];
    uint32_t i;
    for (i = 0; i < r->num_batches; i++) x[i] = r->batches[i];
    plot_frame(s, p, "Distinct experts of a batch", "consecutive tokens", "experts that are read", 1);
    plot_line(s, p, -1, "uniform routing", "experts", x, r->uniform, r->num_batches);
    plot_line(s, p, 0, "this routing", "experts", x, r->distinct, r->num_batches);
    labels[0].y = r->uniform[r->num_batches - 1];
    labels[0].colour = -1;
    labels[0].text = "uniform";
    labels[1].y = r->distinct[r->num_batches - 1];
    labels[1].colour = 0;
    labels[1].text = "measured";
    plot_labels(s, p, labels, 2);
}

static void route_write_svg(const routing *r) {
    FILE *file = output_open(route_wanted.svg);
    const char *name = strrchr(r->source, '/');
    char title[256], subtitle[256];
    svg s;
    plot bars = {72, 122, 800, 170, -0.5, 0, 0, 0}, curve = {600, 400, 260, 340, 1, 0, 0, 1};
    snprintf(title, sizeof title, "Routing of %.120s", name ? name + 1 : r->source);
    snprintf(subtitle, sizeof subtitle,
             "%u tokens, %u experts, top-%u; experts without a token: %u; effective experts, by entropy: %.1f",
             (unsigned)r->num_tokens, (unsigned)r->num_experts, (unsigned)r->top_k, (unsigned)r->unused, r->effective);
    bars.x_most = r->num_experts - 0.5;
    plot_fit(&bars, r->most);
    curve.x_most = r->batches[r->num_batches - 1];
    plot_fit(&curve, route_largest(r->distinct, r->num_batches) > route_largest(r->uniform, r->num_batches)
                         ? route_largest(r->distinct, r->num_batches)
                         : route_largest(r->uniform, r->num_batches));
    svg_begin(&s, file, 1000, 800, title, subtitle);
    route_draw_bars(&s, r, &bars);
    route_draw_together(&s, r, 72, 400, 340);
    route_draw_distinct(&s, r, &curve);
    svg_end(&s);
    output_close(file, route_wanted.svg);
}

static int route_main(int argc, char **argv) {
    static routing r;
    options_parse(&route_command, argc, argv);
    if (!route_wanted.logits == !route_wanted.trace)
        stop(STATUS_USAGE, "%s: the input is --logits FILE or --trace FILE",
             route_wanted.logits ? "both are given" : "nothing is given");
    r.source = route_wanted.logits ? route_wanted.logits : route_wanted.trace;
    if (route_wanted.logits) route_logits(&r);
    else route_trace(&r);
    route_count(&r);
    if (route_wanted.csv) route_write_csv(&r);
    if (route_wanted.text) route_write_text(&r);
    if (route_wanted.json) route_write_json(&r);
    if (route_wanted.svg) route_write_svg(&r);
    if (!output_is_stdout(route_wanted.csv) && !output_is_stdout(route_wanted.text) && !output_is_stdout(route_wanted.json) &&
        !output_is_stdout(route_wanted.svg))
        route_print(&r);
    free(r.ids);
    free(r.weights);
    free(r.shared_weights);
    free(r.tokens);
    free(r.together);
    return STATUS_OK;
}

#endif /* ROUTE_PICTURE_H */

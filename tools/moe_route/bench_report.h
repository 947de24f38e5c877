/*
  bench_report.h: the rows of a benchmark, as a table while they come, as CSV and JSON, and as plots of time against tokens
  beside the floor and of the ratio of both. Rows may also come from an earlier run's CSV. Nothing here needs a GPU.
*/
#ifndef BENCH_REPORT_H
#define BENCH_REPORT_H

enum { BENCH_ROWS = 1024, BENCH_PANELS = 24 };

static struct bench_options {
    int router, combine, layer, kernels;
    option_texts shapes;
    const char *tokens, *from, *csv, *json, *svg;
    uint32_t calls;
    float distinct;
} bench_wanted = {.tokens = "1,2,4,8,16", .calls = 200};

typedef struct bench_row { /* one line of the report */
    char what[24], shape[64], dtype[8];
    uint32_t tokens;
    double distinct, megabytes, floor, microseconds, target; /* floor: the read, or the empty node; 0: unknown, as the others */
} bench_row;

typedef struct bench_report {
    char gpu[128];
    int driver_version;
    double empty; /* microseconds of an empty node; 0: unknown */
    bench_row rows[BENCH_ROWS];
    uint32_t num_rows;
    int quiet; /* stdout is a file's */
} bench_report;

/* ---- the table ---- */

static void report_header(const bench_report *r, const char *floor) {
    if (!r->quiet)
        printf("\n%-14s %-26s %-5s %4s %8s %8s %8s %9s %9s\n", "what", "shape", "x", "T", "distinct", "MB", floor, "us",
               "target");
}

static void report_print(const bench_row *row) {
    printf("%-14s %-26s %-5s %4u ", row->what, row->shape, row->dtype, (unsigned)row->tokens);
    if (row->distinct > 0) printf("%8.1f %8.1f ", row->distinct, row->megabytes);
    else printf("%8s %8s ", "", "");
    if (row->floor > 0) printf("%8.2f %9.2f ", row->floor, row->microseconds);
    else printf("%8s %9.2f ", "", row->microseconds);
    if (row->target > 0) printf("%9.2f %s", row->target, row->microseconds <= row->target ? "yes" : "no");
    printf("\n");
    fflush(stdout);
}

static void report_add(bench_report *r, const char *what, const char *shape, const char *dtype, uint32_t tokens, double distinct,
                       double megabytes, double floor, double microseconds, double target) {
    bench_row *row = &r->rows[r->num_rows];
    if (r->num_rows == BENCH_ROWS) stop(STATUS_FAILED, "there are more than %d rows", BENCH_ROWS);
    r->num_rows++;
    memset(row, 0, sizeof *row);
    snprintf(row->what, sizeof row->what, "%s", what);
    snprintf(row->shape, sizeof row->shape, "%s", shape);
    snprintf(row->dtype, sizeof row->dtype, "%s", dtype);
    row->tokens = tokens;
    row->distinct = distinct;
    row->megabytes = megabytes;
    row->floor = floor;
    row->microseconds = microseconds;
    row->target = target;
    if (!r->quiet) report_print(row);
}

/* ---- CSV and JSON ---- */

static void report_write_csv(const bench_report *r) {
    FILE *file = output_open(bench_wanted.csv);
    uint32_t i;
    fprintf(file, "what,shape,dtype,tokens,distinct,megabytes,floor_us,us,target_us\n");
    for (i = 0; i < r->num_rows; i++) {
        const bench_row *row = &r->rows[i];
        csv_text(file, row->what);
        fputc(',', file);
        csv_text(file, row->shape);
        fprintf(file, ",%s,%u,%.2f,%.3f,%.3f,%.3f,%.3f\n", row->dtype, (unsigned)row->tokens, row->distinct, row->megabytes,
                row->floor, row->microseconds, row->target);
    }
    output_close(file, bench_wanted.csv);
}

static void report_write_json(const bench_report *r) {
    FILE *file = output_open(bench_wanted.json);
    json_writer json;
    uint32_t i;
    json_begin_file(&json, file, 2);
    json_begin(&json, NULL, '{');
    json_text(&json, "gpu", r->gpu[0] ? r->gpu : NULL);
    json_count(&json, "driver", (uint64_t)r->driver_version);
    json_number(&json, "empty_node_us", r->empty, 4);
    json_text(&json, "moe_route", MOE_ROUTE_VERSION);
    json_begin(&json, "rows", '[');
    for (i = 0; i < r->num_rows; i++) {
        const bench_row *row = &r->rows[i];
        json_begin(&json, NULL, '{');
        json_text(&json, "what", row->what + strspn(row->what, " "));
        json_text(&json, "shape", row->shape);
        json_text(&json, "dtype", row->dtype);
        json_count(&json, "tokens", row->tokens);
        json_number(&json, "distinct", row->distinct, 5);
        json_number(&json, "megabytes", row->megabytes, 7);
        json_number(&json, "floor_us", row->floor, 6);
        json_number(&json, "us", row->microseconds, 6);
        json_number(&json, "target_us", row->target, 6);
        json_end(&json, '}');
    }
    json_end(&json, ']');
    json_end(&json, '}');
    output_close(file, bench_wanted.json);
}

/* One field of a line as report_write_csv writes it; moves past it. */
static void report_read_field(char **at, char *field, size_t size) {
    size_t length = 0;
    const int quoted = **at == '"';
    for (*at += quoted; **at && (quoted || (**at != ',' && **at != '\n' && **at != '\r')); (*at)++) {
        if (quoted && **at == '"' && *++*at != '"') break;
        if (length + 1 < size) field[length++] = **at;
    }
    field[length] = 0;
    if (**at == ',') (*at)++;
}

static void report_read_csv(bench_report *r) {
    FILE *file = fopen(bench_wanted.from, "r");
    char line[512];
    unsigned long number = 0;
    if (!file) stop(STATUS_FILE, "%s can't be read: %s", bench_wanted.from, strerror(errno));
    while (fgets(line, sizeof line, file)) {
        char *at = line, texts[3][64], field[32];
        double values[6];
        int i;
        if (number++ == 0) {
            if (strncmp(line, "what,shape,dtype,tokens,distinct,megabytes,floor_us,us,target_us", 64) != 0) break;
            continue;
        }
        for (i = 0; i < 3; i++) report_read_field(&at, texts[i], sizeof texts[i]);
        for (i = 0; i < 6; i++) {
            char *end;
            report_read_field(&at, field, sizeof field);
            values[i] = strtod(field, &end);
            if (end == field || *end || !(values[i] >= (i == 0 || i == 4 ? 1e-6 : 0) && values[i] < 1e9) ||
                (i == 0 && floor(values[i]) != values[i]))
                stop(STATUS_FILE, "%s, line %lu: number %d is \"%s\"", bench_wanted.from, number, i + 1, field);
        }
        report_add(r, texts[0], texts[1], texts[2], (uint32_t)values[0], values[1], values[2], values[3], values[4], values[5]);
    }
    fclose(file);
    if (r->num_rows == 0) stop(STATUS_FILE, "%s isn't what --csv writes", bench_wanted.from);
}

/* ---- plots: a panel for each layer, one for what has no layer, and one for the ratios ---- */

enum { PANEL_WIDTH = 580, PANEL_HEIGHT = 340, PANEL_POINTS = 32, PANEL_LINES = 16 };

typedef struct panel_line {
    char name[27]; /* as much as has room beside the plot */
    double x[PANEL_POINTS], y[PANEL_POINTS];
    uint32_t count;
    int colour;
} panel_line;

typedef struct panel {
    char title[96], unit[16], y_name[48];
    panel_line lines[PANEL_LINES];
    uint32_t num_lines;
} panel;

static void panel_point(panel *p, const char *name, int compared, double x, double y) {
    uint32_t i, drawn = 0;
    panel_line *line;
    for (i = 0; i < p->num_lines && strncmp(p->lines[i].name, name, sizeof p->lines[i].name - 1) != 0; i++)
        drawn += p->lines[i].colour >= 0;
    if (i == PANEL_LINES) return;
    line = &p->lines[i];
    if (i == p->num_lines) {
        p->num_lines++;
        snprintf(line->name, sizeof line->name, "%.26s", name);
        line->colour = compared ? -1 : (int)(drawn % SVG_COLOURS);
    }
    for (i = 0; compared && i < line->count; i++)
        if (line->x[i] == x) return; /* the empty node's of another shape */
    if (line->count == PANEL_POINTS) return;
    for (i = line->count++; i > 0 && line->x[i - 1] > x; i--) { /* in the order of x */
        line->x[i] = line->x[i - 1];
        line->y[i] = line->y[i - 1];
    }
    line->x[i] = x;
    line->y[i] = y;
}

static panel *panel_find(panel *panels, uint32_t *count, const char *title, const char *unit, const char *y_name) {
    uint32_t i;
    for (i = 0; i < *count && strcmp(panels[i].title, title) != 0; i++) continue;
    if (i == BENCH_PANELS) return NULL;
    if (i == *count) {
        ++*count;
        snprintf(panels[i].title, sizeof panels[i].title, "%s", title);
        snprintf(panels[i].unit, sizeof panels[i].unit, "%s", unit);
        snprintf(panels[i].y_name, sizeof panels[i].y_name, "%s", y_name);
    }
    return &panels[i];
}

/* The layer whose launches alone follow it has them in its panel. */
static void panels_add(const bench_row *row, panel *panels, uint32_t *count) {
    const char *what = row->what + strspn(row->what, " ");
    const int is_layer = strcmp(what, "layer") == 0, is_part = what != row->what;
    char title[96];
    panel *p;
    if (is_layer || is_part)
        snprintf(title, sizeof title, "Layer %s%s%s", row->shape, row->dtype[0] ? ", x in " : "", row->dtype);
    else
        snprintf(title, sizeof title, "%c%.60s", what[0] >= 'a' && what[0] <= 'z' ? what[0] - 32 : what[0],
                 what + (what[0] != 0));
    p = panel_find(panels, count, title, "us", "microseconds");
    if (!p) return;
    panel_point(p, is_layer ? "layer" : is_part ? what : row->shape, 0, row->tokens, row->microseconds);
    if (!is_part && row->floor > 0) panel_point(p, is_layer ? "read floor" : "empty node", 1, row->tokens, row->floor);
}

static void panels_add_ratio(const bench_row *row, panel *panels, uint32_t *count) {
    panel *p;
    if (strcmp(row->what, "layer") != 0 || !(row->floor > 0)) return;
    p = panel_find(panels, count, "Layers, time over read floor", "times", "times the read floor");
    if (!p) return;
    panel_point(p, "read floor", 1, row->tokens, 1);
    panel_point(p, row->shape, 0, row->tokens, row->microseconds / row->floor);
}

/* Layers, their ratios, the rest. */
static uint32_t panels_fill(const bench_report *r, panel *panels) {
    uint32_t count = 0, i;
    for (i = 0; i < r->num_rows; i++)
        if (strcmp(r->rows[i].what, "layer") == 0 || r->rows[i].what[0] == ' ') panels_add(&r->rows[i], panels, &count);
    for (i = 0; i < r->num_rows; i++) panels_add_ratio(&r->rows[i], panels, &count);
    for (i = 0; i < r->num_rows; i++)
        if (strcmp(r->rows[i].what, "layer") != 0 && r->rows[i].what[0] != ' ') panels_add(&r->rows[i], panels, &count);
    return count;
}

static void panel_draw(svg *s, const panel *p, double left, double top) {
    plot area = {0, 0, 290, 210, 1, 1, 0, 1};
    plot_label labels[PANEL_LINES];
    double most = 0;
    uint32_t i, j;
    area.left = left + 64;
    area.top = top + 56;
    area.x_least = HUGE_VAL;
    for (i = 0; i < p->num_lines; i++)
        for (j = 0; j < p->lines[i].count; j++) {
            if (p->lines[i].y[j] > most) most = p->lines[i].y[j];
            if (p->lines[i].x[j] < area.x_least) area.x_least = p->lines[i].x[j];
            if (p->lines[i].x[j] > area.x_most) area.x_most = p->lines[i].x[j];
        }
    plot_fit(&area, most);
    plot_frame(s, &area, p->title, "tokens a call", p->y_name, 0);
    for (i = 0; i < p->num_lines; i++) {
        const panel_line *line = &p->lines[i];
        plot_line(s, &area, line->colour, line->name, p->unit, line->x, line->y, line->count);
        labels[i].y = line->y[line->count - 1];
        labels[i].colour = line->colour;
        labels[i].text = line->name;
    }
    plot_labels(s, &area, labels, p->num_lines);
}

static void report_write_svg(const bench_report *r) {
    FILE *file = output_open(bench_wanted.svg);
    panel *panels = (panel *)allocate(BENCH_PANELS, sizeof *panels);
    const uint32_t count = panels_fill(r, panels), columns = count > 1 ? 2 : 1;
    const char *name = bench_wanted.from ? strrchr(bench_wanted.from, '/') : NULL;
    char subtitle[256];
    svg s;
    uint32_t i;
    if (r->gpu[0])
        snprintf(subtitle, sizeof subtitle, "%.120s, driver %d.%d; moe_route %s; CUDA graph replay, expert weights from memory",
                 r->gpu, r->driver_version / 1000, r->driver_version % 1000 / 10, MOE_ROUTE_VERSION);
    else
        snprintf(subtitle, sizeof subtitle, "from %.160s; CUDA graph replay, expert weights from memory",
                 name ? name + 1 : bench_wanted.from);
    svg_begin(&s, file, columns * PANEL_WIDTH, 80 + (count + columns - 1) / columns * PANEL_HEIGHT,
              "Time of a Mixture-of-Experts layer", subtitle);
    for (i = 0; i < count; i++) panel_draw(&s, &panels[i], i % columns * PANEL_WIDTH, 80 + i / columns * (double)PANEL_HEIGHT);
    svg_end(&s);
    free(panels);
    output_close(file, bench_wanted.svg);
}

#endif /* BENCH_REPORT_H */

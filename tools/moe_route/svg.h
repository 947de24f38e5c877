/*
  svg.h: pictures as SVG, self-contained and readable on a light and on a dark page: text, bars, and plots of lines over
  linear or powers-of-two axes with labels at the lines' ends. What is plotted belongs to the subcommands. Include
  options.h first.
*/
#ifndef SVG_H
#define SVG_H

typedef struct svg {
    FILE *file;
    double width, height;
} svg;

enum { SVG_COLOURS = 6 }; /* classes l0 to l5 for lines, f0 to f5 for what is filled, text included */

static const char svg_style[] =
    "text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}\n"
    "text.title{font-size:17px;font-weight:600}text.panel{font-size:13px;font-weight:600}text.label{font-weight:600}\n"
    ".line{fill:none;stroke-width:2;stroke-linejoin:round}.dashed{stroke-dasharray:5 4}.thin{stroke-width:1}\n"
    ".page{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#59636e}.empty{fill:#f3f4f6}\n"
    ".grid{stroke:#e4e7eb}.axis{stroke:#8c959f}.floor{stroke:#6e7781}.floortext{fill:#6e7781}\n"
    ".l0{stroke:#0b63c5}.l1{stroke:#c2410c}.l2{stroke:#1a7f37}.l3{stroke:#8250df}.l4{stroke:#bf3989}.l5{stroke:#0e7490}\n"
    ".f0{fill:#0b63c5}.f1{fill:#c2410c}.f2{fill:#1a7f37}.f3{fill:#8250df}.f4{fill:#bf3989}.f5{fill:#0e7490}\n"
    "@media (prefers-color-scheme:dark){\n"
    ".page{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9198a1}.empty{fill:#161b22}\n"
    ".grid{stroke:#262c34}.axis{stroke:#6e7681}.floor{stroke:#9198a1}.floortext{fill:#9198a1}\n"
    ".l0{stroke:#6cb6ff}.l1{stroke:#ffa657}.l2{stroke:#7ee787}.l3{stroke:#d2a8ff}.l4{stroke:#ff9bce}.l5{stroke:#56d4dd}\n"
    ".f0{fill:#6cb6ff}.f1{fill:#ffa657}.f2{fill:#7ee787}.f3{fill:#d2a8ff}.f4{fill:#ff9bce}.f5{fill:#56d4dd}\n"
    "}\n";

/* Text as XML: control characters and what isn't ASCII become a question mark, but for the few signs that labels use. */
static void svg_escape(FILE *file, const char *text) {
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '&') fputs("&amp;", file);
        else if (c == '<') fputs("&lt;", file);
        else if (c == '>') fputs("&gt;", file);
        else if (c == '"') fputs("&quot;", file);
        else if (c == 0xc2 && (unsigned char)text[1] == 0xb5) { /* the micro sign */ fputs("&#181;", file);
            text++;
        } else fputc(c < 0x20 || c > 0x7e ? '?' : c, file);
    }
}

static void svg_begin(svg *s, FILE *file, double width, double height, const char *title, const char *subtitle) {
    s->file = file;
    s->width = width;
    s->height = height;
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" "
            "role=\"img\">\n<title>",
            width, height, width, height);
    svg_escape(file, title);
    fprintf(file, "</title>\n<style>\n%s</style>\n<rect class=\"page\" width=\"%.0f\" height=\"%.0f\"/>\n", svg_style, width,
            height);
    fprintf(file, "<text class=\"title ink\" x=\"24\" y=\"34\">");
    svg_escape(file, title);
    fprintf(file, "</text>\n<text class=\"soft\" x=\"24\" y=\"54\">");
    svg_escape(file, subtitle);
    fprintf(file, "</text>\n");
}

static void svg_end(svg *s) { fprintf(s->file, "</svg>\n"); }

/* `anchor` is start, middle or end. */
static void svg_text(svg *s, const char *classes, const char *anchor, double x, double y, const char *format, ...)
    OPTIONS_PRINTF(6, 7);

static void svg_text(svg *s, const char *classes, const char *anchor, double x, double y, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(s->file, "<text class=\"%s\" text-anchor=\"%s\" x=\"%.1f\" y=\"%.1f\">", classes, anchor, x, y);
    svg_escape(s->file, text);
    fprintf(s->file, "</text>\n");
}

static void svg_line(svg *s, const char *classes, double x1, double y1, double x2, double y2) {
    fprintf(s->file, "<line class=\"%s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", classes, x1, y1, x2, y2);
}

/* `tip` is shown while the pointer rests on it. */
static void svg_rect(svg *s, const char *classes, double x, double y, double width, double height, double opacity,
                     const char *tip) {
    fprintf(s->file, "<rect class=\"%s\" x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\"", classes, x, y, width, height);
    if (opacity < 1) fprintf(s->file, " fill-opacity=\"%.3f\"", opacity);
    if (!tip) {
        fprintf(s->file, "/>\n");
        return;
    }
    fprintf(s->file, "><title>");
    svg_escape(s->file, tip);
    fprintf(s->file, "</title></rect>\n");
}

/* ---- plots ---- */

typedef struct plot {
    double left, top, width, height; /* of the area with the lines */
    double x_least, x_most, y_most;  /* y begins at 0 */
    int powers;                      /* x is by powers of two */
} plot;

static double plot_x(const plot *p, double x) {
    const double least = p->powers ? log2(p->x_least) : p->x_least, most = p->powers ? log2(p->x_most) : p->x_most;
    return p->left + (most > least ? ((p->powers ? log2(x) : x) - least) / (most - least) : 0.5) * p->width;
}

static double plot_y(const plot *p, double y) { return p->top + p->height - y / p->y_most * p->height; }

/* A step of 1, 2 or 5 times a power of ten that gives about `count` of them. */
static double plot_step(double range, int count, int whole) {
    const double rough = range / count, power = pow(10, floor(log10(rough)));
    const double step = rough <= power ? power : rough <= 2 * power ? 2 * power : rough <= 5 * power ? 5 * power : 10 * power;
    return whole && step < 1 ? 1 : step;
}

/* Sets the top of y to a round number above `most`. */
static void plot_fit(plot *p, double most) {
    const double step = plot_step(most > 0 ? most : 1, 5, 0);
    p->y_most = ceil(most / step + 0.05) * step;
    if (!(p->y_most > 0)) p->y_most = 1;
}

/* Title, grid, ticks and the axes' names. */
static void plot_frame(svg *s, const plot *p, const char *title, const char *x_name, const char *y_name, int whole_y) {
    const double bottom = p->top + p->height, right = p->left + p->width, step = plot_step(p->y_most, 5, whole_y);
    double tick;
    svg_text(s, "panel ink", "start", p->left, p->top - 30, "%s", title);
    svg_text(s, "soft", "start", p->left, p->top - 12, "%s", y_name);
    for (tick = 0; tick <= p->y_most * 1.0001; tick += step) {
        svg_line(s, tick > 0 ? "grid" : "axis", p->left, plot_y(p, tick), right, plot_y(p, tick));
        svg_text(s, "soft", "end", p->left - 8, plot_y(p, tick) + 4, "%.10g", tick);
    }
    if (p->powers) {
        const int every = (int)(log2(p->x_most / p->x_least) * 34 / p->width) + 1;
        int n = 0;
        for (tick = p->x_least; tick <= p->x_most * 1.0001; tick *= 2, n++)
            if (n % every == 0) {
                svg_line(s, "axis", plot_x(p, tick), bottom, plot_x(p, tick), bottom + 4);
                svg_text(s, "soft", "middle", plot_x(p, tick), bottom + 18, "%.10g", tick);
            }
    } else {
        const double x_step = plot_step(p->x_most - p->x_least, (int)(p->width / 70) + 1, 1);
        for (tick = ceil(p->x_least / x_step) * x_step + 0.0; tick <= p->x_most; tick += x_step) {
            svg_line(s, "axis", plot_x(p, tick), bottom, plot_x(p, tick), bottom + 4);
            svg_text(s, "soft", "middle", plot_x(p, tick), bottom + 18, "%.10g", tick);
        }
    }
    svg_text(s, "soft", "middle", p->left + p->width / 2, bottom + 36, "%s", x_name);
}

/* A line through points, each with its numbers as a tip. `colour` is 0 to 5, or -1 for what is compared with: grey and dashed. */
static void plot_line(svg *s, const plot *p, int colour, const char *name, const char *unit, const double *x, const double *y,
                      unsigned count) {
    char line[32], dot[32];
    unsigned i;
    snprintf(line, sizeof line, colour < 0 ? "line dashed floor" : "line l%d", colour);
    snprintf(dot, sizeof dot, colour < 0 ? "floortext" : "f%d", colour);
    fprintf(s->file, "<polyline class=\"%s\" points=\"", line);
    for (i = 0; i < count; i++) fprintf(s->file, "%s%.1f,%.1f", i ? " " : "", plot_x(p, x[i]), plot_y(p, y[i]));
    fprintf(s->file, "\"/>\n");
    for (i = 0; i < count; i++) {
        fprintf(s->file, "<circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"%s\"><title>", dot, plot_x(p, x[i]), plot_y(p, y[i]),
                colour < 0 ? "2" : "3");
        svg_escape(s->file, name);
        fprintf(s->file, ": %.4g %s at %.10g</title></circle>\n", y[i], unit, x[i]);
    }
}

typedef struct plot_label {
    double y; /* where its line ends */
    int colour;
    const char *text;
} plot_label;

static int plot_by_y(const void *left, const void *right) {
    const double a = ((const plot_label *)left)->y, b = ((const plot_label *)right)->y;
    return (a > b) - (a < b);
}

/* Labels at the right end of the plot, each beside its line's end or as near as the others let it. */
static void plot_labels(svg *s, const plot *p, plot_label *labels, unsigned count) {
    const double gap = 15;
    double places[32];
    unsigned i, round;
    qsort(labels, count, sizeof *labels, plot_by_y);
    for (i = 0; i < count; i++) places[i] = plot_y(p, labels[count - 1 - i].y);
    for (round = 0; round < 200; round++)
        for (i = 0; i + 1 < count; i++)
            if (places[i + 1] - places[i] < gap) {
                const double push = (gap - (places[i + 1] - places[i])) / 2;
                places[i] -= push;
                places[i + 1] += push;
            }
    for (i = 0; i < count; i++) {
        const plot_label *label = &labels[count - 1 - i];
        char classes[32];
        snprintf(classes, sizeof classes, label->colour < 0 ? "label floortext" : "label f%d", label->colour);
        svg_text(s, classes, "start", p->left + p->width + 10, places[i] + 4, "%s", label->text);
    }
}

#endif /* SVG_H */

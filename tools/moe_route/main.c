/*
  main.c: the moe_route command: its subcommands, one a file, and which of them runs. What they share is in options.h (the
  command line), output.h (CSV and JSON), svg.h (plots), layer_options.h and config.h (a layer's description); docs/command.md
  is the user's page. All is one program with the library's implementation in it.
*/
#define MOE_ROUTE_IMPLEMENTATION
#include "../../moe_route.h"

#include <time.h>

#include "../../examples/gpu.h"
#include "../../examples/quantize.h"
#include "../../bench/draws.h"
#include "../../bench/floors.h"

#include "options.h"
#include "output.h"
#include "layer_options.h"
#include "config.h"
#include "info.h"
#include "warm.h"
#include "svg.h"
#include "arrays.h"
#include "route.h"
#include "route_picture.h"
#include "bench_report.h"
#include "bench.h"
#include "bench_layer.h"

#include "../../tests/support/test.h"
#include "../../tests/support/device.h"
#include "../../tests/support/router.h"
#include "../../tests/support/routing.h"
#include "../../tests/support/model.h"
#include "../../tests/support/cases.h"
#include "check.h"
#include "check_device.h"

typedef struct command {
    const char *name, *about;
    int (*run)(int argc, char **argv);
} command;

static const command commands[] = {
    {"info", "GPUs, driver, NVRTC, the cache and what is in it", info_main},
    {"warm", "compile a model's kernels ahead, into the cache or a pack; takes no GPU", warm_main},
    {"bench", "time layers on the GPU beside the floor of reading their experts; tables and plots", bench_main},
    {"route", "logits or a trace in; ids, weights, and pictures of how experts are used out", route_main},
    {"check", "check this GPU against the CPU backend; for bug reports", check_main},
};
enum { NUM_COMMANDS = sizeof commands / sizeof commands[0] };

static void print_help(FILE *file) {
    int i;
    fprintf(file, "usage: moe_route COMMAND [OPTIONS]\n\nmoe_route %s: the Mixture-of-Experts layer at decode time.\n\n",
            MOE_ROUTE_VERSION);
    for (i = 0; i < NUM_COMMANDS; i++) fprintf(file, "  %-8s %s\n", commands[i].name, commands[i].about);
    fprintf(file,
            "\nmoe_route COMMAND --help explains a command; moe_route --version tells the version.\n"
            "Status: 0 fine, 1 a check or something else failed, 2 a wrong option or layer, 3 no GPU, 4 no NVRTC, 5 a file.\n");
}

int main(int argc, char **argv) {
    options_nearest nearest = {NULL, 0};
    int i;
    if (argc < 2) {
        print_help(stderr);
        return STATUS_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return STATUS_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("moe_route %s\n", MOE_ROUTE_VERSION);
        return STATUS_OK;
    }
    for (i = 0; i < NUM_COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) {
            const int status = commands[i].run(argc - 2, argv + 2);
            output_close(stdout, "stdout");
            return status;
        }
        options_compare(&nearest, argv[1], commands[i].name);
    }
    stop(STATUS_USAGE, "there is no command %s; the nearest is %s", argv[1], nearest.name);
}

// usage: main MODEL DIRECTORY ENGINE
//
// Exit status: 0 when all is well, 77 when the engine does not exist here, 1 otherwise.
#include "test.h"

#include <string.h>

static void run(const char *name, void (*test)(void)) {
    int checks = test_checks, failures = test_failures;
    test();
    printf("    %-8s %5d checks, %d failed\n", name, test_checks - checks, test_failures - failures);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s MODEL DIRECTORY ENGINE\n", argv[0]);
        return 2;
    }
    test_model = argv[1];
    test_dir = argv[2];
    test_io = argv[3];

    struct les_model *model = streaming("min");
    char err[512] = "";
    les_status status = les_model_start(model, err, sizeof(err));
    STATUS(LES_OK, les_model_free(model));
    if (status == LES_ERR_INVALID && strcmp(test_io, "uring") == 0) {
        printf("    skipped: %s\n", err);
        return 77;
    }
    STATUS(LES_OK, status);

    run("library", test_library);
    run("models", test_models);
    run("params", test_params);
    run("tickets", test_tickets);
    run("layers", test_layers);
    run("misuse", test_misuse);
    run("walkers", test_walkers);
    run("files", test_files);
    run("profiles", test_profiles);
    run("faults", test_faults);
    run("spec", test_spec);
    run("drafts", test_drafts);
    return test_failures != 0;
}

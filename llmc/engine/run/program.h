// run/program.h -- what a program has beside training: signals, the exit codes of errors, what it was built from.
#pragma once

#include <csignal>
#include <new>

#include "../../base/device.h"
#include "../ranks/comm.h"
#include "../ranks/launch.h"
#include "../log.h"
#include "flags.h"

// Why the last checkpoint of this run was not saved, or "". The run finishes its other work before it exits with this.
inline std::string not_saved;

// Each of STOP_SIGNALS requests a checkpoint and an end after this step. A second SIGINT ends at once, unless a
// checkpoint is being written: the run ends after it anyway.
inline volatile sig_atomic_t saving = 0;        // a checkpoint is being written
inline bool has_trained = false;                // the result is a checkpoint, not what stdout gets
inline void catch_signals() {
    has_trained = true;
    saving = 0;
    struct sigaction action = {};
    action.sa_handler = [](int number) {
        if (number == SIGINT && stop_signal != 0 && !saving) {
            signal(SIGINT, SIG_DFL);
            raise(SIGINT);
        }
        stop_signal = number;
    };
    action.sa_flags = SA_RESTART;
    for (int number : STOP_SIGNALS) {
        struct sigaction before = {};
        sigaction(number, nullptr, &before);
        if (number == SIGHUP && before.sa_handler == SIG_IGN) { continue; }     // started by nohup
        sigaction(number, &action, nullptr);
    }
}
// Undoes what a process may inherit and cannot work with. If the caller has closed descriptor 0, 1 or 2, the next file
// that is opened, a log or a rank's socket, would become the console. So each is opened, by O_PATH: reading and writing
// it still fails. While SIGCHLD is ignored no rank can be waited for, and a blocked signal never arrives.
inline void begin_process() {
    for (int fd : {0, 1, 2}) { if (fcntl(fd, F_GETFD) < 0 && open("/", O_PATH) != fd) { _exit(EXIT_DEVICE); } }
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    for (int number : {SIGCHLD, SIGALRM}) { signal(number, SIG_DFL); }
}
inline void release_signals() {
    for (int number : STOP_SIGNALS) { if (signal(number, SIG_DFL) == SIG_IGN) { signal(number, SIG_IGN); } }
}

// ----------------------------------------------------------------------------------------------------------
// errors

// Prints an error and returns its code. When memory has run out, it allocates none.
inline int report_error(int code, const char* message) {
    try { return comm_report(code, message); } catch (const std::bad_alloc&) {}
    fprintf(stderr, "error: %s\n", message);
    return code;
}

// The same for the exception that is being handled; -1: it is of a kind that this program never throws.
inline int report_exception() {
    char message[400];
    try {
        throw;
    } catch (const Error& e) {
        return report_error(e.code, e.what());
    } catch (const std::bad_alloc&) {
        snprintf(message, sizeof(message), "out of memory while %s: the host has no more, or `ulimit -v` forbids it",
                 doing);
    } catch (const std::length_error&) {
        snprintf(message, sizeof(message), "out of memory while %s: a size beyond what any machine has", doing);
    } catch (const std::system_error& e) {
        snprintf(message, sizeof(message), "cannot create a thread while %s: %s (limits of memory or of processes?)",
                 doing, e.what());
    } catch (...) {
        return -1;
    }
    return report_error(EXIT_OUT_OF_MEMORY, message);
}

// How a process can end without returning from main(): by an exception in a destructor or in a thread of OpenMP, where
// nothing can catch it, or by a library's exit(1), which OpenMP calls without memory. It loses no more than by a kill.
inline bool passes_code_on = false;             // the exit code is that of another process, and may be 1
inline void report_sudden_ends() {
    std::set_terminate([] {
        const int code = std::current_exception() ? report_exception() : -1;
        if (code < 0) { abort(); }
        _exit(code);
    });
    const auto ended = [](int code, void*) {
        if (code != EXIT_FAILURE || passes_code_on) { return; }         // this program never exits with 1
        fprintf(stderr, "error: a library ended the program while %s: no memory, or no thread?\n", doing);
        _exit(EXIT_OUT_OF_MEMORY);
    };
    on_exit(ended, nullptr);
}

// Runs a trainer's main on all ranks and turns what it throws into a message and an exit code.
template <class Main> int run_on_ranks(Main program, Program trainer, int argc, char** argv) {
    try {
        if (!isfinite_works()) {
            die(EXIT_DEVICE, "this binary treats NaN as a number (built with -ffast-math?); build it by make");
        }
        signal(SIGXFSZ, SIG_IGN);               // so that `ulimit -f` causes a write error with a message
        signal(SIGPIPE, SIG_IGN);               // so that `| head` does not end the run
        Options o(trainer);                     // for the start of the ranks; program() reports what is wrong
        try { o = parse_options(argc, argv, trainer); } catch (const Error&) {}
        const Names words(argv, argv + argc);
        comm().timeout = o.collective_timeout;
        Launch launch = find_launch();
        if (o.ranks > 1 && !o.help && !o.check && launch.size == 1) {
            int code = 0;
            passes_code_on = fork_ranks(o.ranks, launch, code);
            if (passes_code_on) { return code; }
        }
        comm_init(launch, words);
        not_saved.clear();
        const int code = program(argc, argv);
        check(not_saved.empty(), "%s", not_saved.c_str());
        const bool printed = fflush(stdout) == 0 && ferror(stdout) == 0;
        check(printed || has_trained, "cannot write to stdout");
        return comm_finish(code);
    } catch (const std::exception&) {
        const int code = report_exception();
        if (code < 0) { throw; }
        return code;
    }
}

// Most of a trainer's main(). What comes first is for a process of its own: a test calls run_on_ranks.
template <class Main> int run_program(Main program, Program trainer, int argc, char** argv) {
    begin_process();
    report_sudden_ends();
    return run_on_ranks(program, trainer, argc, argv);
}

// lab/progress.h -- the progress of a long loop.
#ifndef LLMC_LAB_PROGRESS_H
#define LLMC_LAB_PROGRESS_H

#include "../engine/ranks/comm.h"

// One line that says how far a long loop is: rewritten in place on a terminal, a line every ten seconds elsewhere.
struct Progress {
    std::string label;
    double start = wall_seconds(), last = start;
    bool terminal = isatty(STDERR_FILENO) == 1, shown = false;
    explicit Progress(const std::string& label) : label(label) {}
    void update(uint64_t done, uint64_t total) {
        const double now = wall_seconds();
        if (comm().rank > 0 || done == 0 || now - last < (terminal ? 0.5 : 10.0)) { return; }
        last = now;
        shown = true;
        const double eta = (now - start) / (double)done * (double)(total - done);
        const char *before = terminal ? "\r" : "";
        const char *after = terminal ? "   " : "\n";
        const double percent = 100.0 * (double)done / (double)total;
        fprintf(stderr, "%s%s: %.0f%%, ETA %s%s", before, label.c_str(), percent, format_duration(eta).c_str(), after);
    }
    ~Progress() { if (shown && terminal) { fprintf(stderr, "\r%*s\r", (int)label.size() + 30, ""); } }
};

#endif

// Interleaved timing of many variants in one process, by the CPU time of this thread.
#pragma once
#include <time.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

struct Bench {
    struct Variant { std::string name; double ops; std::function<void()> fn; std::vector<double> rates; int reps = 1; };
    std::vector<Variant> variants;
    std::string where;
    FILE* out = nullptr;
    int rounds = 41;
    Bench(int argc, char** argv) {
        if (argc > 1) rounds = atoi(argv[1]);
        if (argc > 2) out = fopen(argv[2], "w");
    }
    ~Bench() { if (out) fclose(out); }
    static double now() { timespec t; clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
    void shape(const std::string& s) { where = s; variants.clear(); }
    // ops: floating-point (or integer) operations of one call
    void add(const std::string& name, double ops, std::function<void()> fn) { variants.push_back({name, ops, fn, {}}); }
    void run() {
        for (auto& v : variants) { // warm, then as many calls as fill about a millisecond
            v.fn();
            double t = now(); int n = 0;
            do { v.fn(); n++; } while (now() - t < 1e-3);
            v.reps = n;
        }
        for (int r = 0; r < rounds; r++)
            for (size_t i = 0; i < variants.size(); i++) {
                auto& v = variants[(i + r) % variants.size()]; // another order every round
                v.fn(); // its data back into the caches
                double t = now();
                for (int n = 0; n < v.reps; n++) v.fn();
                v.rates.push_back(v.ops * v.reps / (now() - t) * 1e-9);
            }
        for (auto& v : variants) {
            // ratio to the first variant, round by round
            std::vector<double> q, s = v.rates;
            for (size_t r = 0; r < s.size(); r++) q.push_back(v.rates[r] / variants[0].rates[r]);
            std::sort(s.begin(), s.end()); std::sort(q.begin(), q.end());
            auto at = [](const std::vector<double>& x, double p) { return x[size_t(p * (x.size() - 1) + .5)]; };
            const char *w = where.c_str(), *n = v.name.c_str();
            printf("%-34s %-38s %7.1f [%6.1f-%6.1f] x%.3f [%.3f-%.3f]\n", w, n, at(s, .5), at(s, .25), at(s, .75), at(q, .5), at(q, .25), at(q, .75));
            if (out)
                fprintf(out, "{\"shape\": \"%s\", \"variant\": \"%s\", \"gflops\": %.1f, \"p25\": %.1f, \"p75\": %.1f, \"ratio_to_first\": %.3f}\n",
                        w, n, at(s, .5), at(s, .25), at(s, .75), at(q, .5));
        }
        fflush(stdout);
    }
};

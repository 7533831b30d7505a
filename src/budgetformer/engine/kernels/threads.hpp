// A few threads that work through one batch together and sleep between batches.
//
// Waiting spins for some microseconds and then sleeps: neighbours on a shared machine get the processor. (An OpenMP
// runtime spins by default, and on a shared machine one barrier then costs a scheduler's slice.)
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace bf {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Waits until `ready` holds: some microseconds awake, then asleep until told.
class Gate {
   public:
    template <class Ready>
    void wait(Ready ready) {
        for (int i = 0; i < 1000; i++) {
            if (ready()) return;
            relax();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, ready);
    }
    template <class Change>
    void tell(Change change) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            change();
        }
        changed_.notify_all();
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
};

// All of `count` threads meet; the last to arrive does what the next phase needs done once.
class Barrier {
   public:
    explicit Barrier(int count) : count_(count) {}
    template <class Once>
    void meet(Once once) {
        if (count_ == 1) return once();
        const unsigned phase = phase_.load();
        if (arrived_.fetch_add(1) + 1 == count_) {
            once();
            arrived_.store(0);
            gate_.tell([&] { phase_.store(phase + 1); });
        } else {
            gate_.wait([&] { return phase_.load() != phase; });
        }
    }

   private:
    const int count_;
    std::atomic<int> arrived_{0};
    std::atomic<unsigned> phase_{0};
    Gate gate_;
};

class Pool {
   public:
    explicit Pool(int count) : count_(count) { start(); }
    ~Pool() {
        if (state_ && getpid() != owner_) abandon();
        else if (state_) stop();
    }
    int count() const { return count_; }
    bool forked() const { return getpid() != owner_; }

    // body(i) on every thread i; the caller is thread 0. Returns when all are done.
    void run(const std::function<void(int)>& body) {
        if (count_ == 1) return body(0);
        if (!state_ || forked()) {  // after a fork the threads are the parent's
            abandon();
            start();
        }
        State& s = *state_;
        s.gate.tell([&] {
            s.body = &body;
            s.left = count_ - 1;
            s.round++;
        });
        body(0);
        s.done.wait([&] { return s.left.load() == 0; });
    }

   private:
    struct State {
        Gate gate, done;
        std::atomic<unsigned> round{0};
        std::atomic<int> left{0};
        std::atomic<bool> stop{false};
        const std::function<void(int)>* body = nullptr;
    };

    void start() {
        owner_ = getpid();
        state_ = new State;
        State* s = state_;
        try {
            for (int i = 1; i < count_; i++)
                threads_.emplace_back([s, i] {
                    for (unsigned seen = 0;;) {
                        s->gate.wait([&] { return s->round.load() != seen || s->stop.load(); });
                        if (s->stop.load()) return;
                        seen = s->round.load();
                        (*s->body)(i);
                        s->done.tell([&] { s->left--; });
                    }
                });
        } catch (const std::system_error&) {
            stop();  // those that did start
            throw std::runtime_error("cannot start " + std::to_string(count_) + " threads");
        }
    }

    void stop() {
        state_->gate.tell([&] { state_->stop = true; });
        for (auto& thread : threads_) thread.join();
        threads_.clear();
        delete state_;
        state_ = nullptr;
    }

    // Threads of another process can be neither joined nor freed here.
    void abandon() {
        new std::vector<std::thread>(std::move(threads_));
        threads_.clear();
    }

    const int count_;
    pid_t owner_ = 0;
    State* state_ = nullptr;
    std::vector<std::thread> threads_;
};

}  // namespace bf

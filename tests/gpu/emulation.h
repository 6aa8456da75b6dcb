// CUDA's words on a CPU, so that a .cu text runs unchanged: blocks in turn, the threads of a block
// as real threads with a real barrier, __shared__ as memory they share.
// Real threads (not one loop) keep a missing barrier a data race that a thread sanitizer can see.
#pragma once
#include <barrier>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

using std::exp2;
using std::fabs;
using std::log1p;
using std::sqrt;

#define __global__
#define __device__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

namespace emulation {
struct Dim {
    unsigned x, y, z;
};
inline std::barrier<>* block_barrier = nullptr;
}  // namespace emulation

inline thread_local emulation::Dim threadIdx{0, 0, 0}, blockIdx{0, 0, 0};
inline emulation::Dim blockDim{1, 1, 1}, gridDim{1, 1, 1};

inline void __syncthreads() { emulation::block_barrier->arrive_and_wait(); }

namespace emulation {

// One letter per argument: p pointer, l 64-bit integer, f float, d double, ? anything else.
template <class A>
constexpr char letter() {
    if (std::is_pointer_v<A>) return 'p';
    if (std::is_same_v<A, long long>) return 'l';
    if (std::is_same_v<A, float>) return 'f';
    if (std::is_same_v<A, double>) return 'd';
    return '?';
}

template <class... A>
void signature(void (*)(A...), char* text) {
    const char letters[] = {letter<A>()..., '\0'};
    std::memcpy(text, letters, sizeof letters);
}

template <class... A, std::size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
}

// Blocks first, ..., last - 1 of the grid, numbered with x fastest.
template <class... A>
void launch(void (*kernel)(A...), const unsigned* grid, unsigned threads, long long first,
            long long last, void** arguments) {
    std::barrier<> barrier(threads);
    block_barrier = &barrier;
    gridDim = {grid[0], grid[1], 1};
    blockDim = {threads, 1, 1};
    const auto work = [&](unsigned thread) {
        threadIdx = {thread, 0, 0};
        for (long long block = first; block < last; ++block) {
            blockIdx = {unsigned(block % grid[0]), unsigned(block / grid[0]), 0};
            call(kernel, arguments, std::index_sequence_for<A...>{});
            barrier.arrive_and_wait();  // the next block reuses the shared memory
        }
    };
    std::vector<std::thread> team;
    for (unsigned thread = 0; thread < threads; ++thread) team.emplace_back(work, thread);
    for (auto& one : team) one.join();
}

}  // namespace emulation

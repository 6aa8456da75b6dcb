// Gram matrices of stationary kernels on a CUDA device: K(x, y) written once, or K(x, y) W without K.
//
// Inputs come scaled by the inverse length scales and row-major: x (n, d), y (m, d), w (m, t).
// Distances are summed as (x - y)^2 or |x - y|, never as |x|^2 + |y|^2 - 2xy: in float32 that form
// loses the small distances of data far from 0. Every index is 64 bits wide: n * m passes 2^31 at
// 46341 rows. No header is included, so NVRTC needs no include path and a CPU build needs only a
// definition of CUDA's own words.

typedef long long Index;

constexpr int LANES = 32;                    // threads of a warp: neighbouring columns of K
constexpr int THREADS = 256;                 // of a block: 8 warps
constexpr int ROWS = 8;                      // of K in one thread, neighbours: one warp, one band
constexpr int COLUMNS = 2;                   // of K in one thread, LANES apart: whole-line writes
constexpr int TILE = LANES * COLUMNS;        // a block makes TILE x TILE entries of K
constexpr int DEPTH = 16;                    // inputs held in shared memory at a time
constexpr int STRIDE = TILE + 4;             // 4 more: spreads the transposing stores over banks
constexpr int PITCH = LANES + 1;             // of the last sum: rows read without bank conflicts

static_assert(TILE == THREADS / LANES * ROWS, "the bands of all warps fill the tile");
static_assert(TILE * PITCH <= 2 * DEPTH * STRIDE, "the last sum fits in the two tiles");
static_assert(STRIDE % 4 == 0 && ROWS % 4 == 0, "a band of a tile starts on 16 bytes");

// ------------------------------------------------------------------------------------ families
// add: one more input into the distance. value: the kernel at that distance.
// exp(-s) is exp2(-s log2 e): one instruction on the device, and |s| exp(-s) < 0.37 keeps the
// rounding of the product below one unit in the last place of 1.

template <class T>
__device__ inline T exp_minus(T s) {
    return exp2(T(-1.4426950408889634074) * s);
}

struct Squared {
    template <class T>
    __device__ static T add(T sum, T difference) {
        return sum + difference * difference;
    }
};

struct Rbf : Squared {
    template <class T>
    __device__ static T value(T sum, T) {
        return exp_minus(T(0.5) * sum);
    }
};

struct Matern12 : Squared {
    template <class T>
    __device__ static T value(T sum, T) {
        return exp_minus(sqrt(sum));
    }
};

struct Matern32 : Squared {
    template <class T>
    __device__ static T value(T sum, T) {
        const T r = sqrt(T(3) * sum);
        return (T(1) + r) * exp_minus(r);
    }
};

struct Matern52 : Squared {
    template <class T>
    __device__ static T value(T sum, T) {
        const T r = sqrt(T(5) * sum);
        return (T(1) + r + r * r / T(3)) * exp_minus(r);
    }
};

struct RationalQuadratic : Squared {  // parameter: the mixture
    template <class T>
    __device__ static T value(T sum, T mixture) {
        return exp_minus(mixture * log1p(sum / (T(2) * mixture)));
    }
};

struct Laplacian {
    template <class T>
    __device__ static T add(T sum, T difference) {
        return sum + fabs(difference);
    }
    template <class T>
    __device__ static T value(T sum, T) {
        return exp_minus(sum);
    }
};

// --------------------------------------------------------------------------------------- places

__device__ inline Index offset(Index row, Index width, Index column) { return row * width + column; }

__device__ inline Index tiles(Index length) { return (length + TILE - 1) / TILE; }

// Rows first, first + 1, ... and columns k0, k0 + 1, ... of a (length, d) matrix, transposed into
// tile. Rows past the end become 0; nothing is read there, and no result of theirs is written.
template <class T>
__device__ void load(T* tile, const T* __restrict__ source, Index first, Index length, Index d,
                     Index k0, int depth) {
    for (int e = threadIdx.x; e < TILE * depth; e += THREADS) {
        const int row = e / depth, k = e % depth;
        const bool inside = first + row < length;
        tile[k * STRIDE + row] = inside ? source[offset(first + row, d, k0 + k)] : T(0);
    }
}

// The distances of one thread's ROWS x COLUMNS pairs grow by `depth` inputs.
template <class Family, class T>
__device__ void add(T (&sums)[ROWS][COLUMNS], const T* tile_x, const T* tile_y, int depth) {
    const int lane = threadIdx.x % LANES, band = threadIdx.x / LANES * ROWS;
#pragma unroll 4
    for (int k = 0; k < depth; ++k) {
        T a[ROWS], b[COLUMNS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) a[r] = tile_x[k * STRIDE + band + r];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) b[c] = tile_y[k * STRIDE + lane + c * LANES];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sums[r][c] = Family::add(sums[r][c], a[r] - b[c]);
    }
}

// The distances of a block's tile of pairs. `fresh`: x's tile is not in shared memory yet; where
// all d inputs fit in one tile, it stays there from one tile of columns to the next.
template <class Family, class T>
__device__ void distances(T (&sums)[ROWS][COLUMNS], T* tile_x, T* tile_y, const T* __restrict__ x,
                          const T* __restrict__ y, Index row, Index column, Index n, Index m,
                          Index d, bool fresh) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) sums[r][c] = T(0);
    for (Index k0 = 0; k0 < d; k0 += DEPTH) {
        const int depth = d - k0 < DEPTH ? int(d - k0) : DEPTH;
        __syncthreads();  // every thread is done with the tiles of before
        if (fresh || d > DEPTH) load(tile_x, x, row, n, d, k0, depth);
        load(tile_y, y, column, m, d, k0, depth);
        __syncthreads();  // the tiles are whole
        add<Family>(sums, tile_x, tile_y, depth);
    }
}

// -------------------------------------------------------------------------------------- kernels

// out (n, m) = K(x, y). One block a tile, tiles of one band of rows next to each other on grid x.
template <class Family, class T>
__global__ void __launch_bounds__(THREADS)
    gram(const T* __restrict__ x, const T* __restrict__ y, T* __restrict__ out, Index n, Index m,
         Index d, T parameter) {
    __shared__ __align__(16) T tile_x[DEPTH * STRIDE];
    __shared__ __align__(16) T tile_y[DEPTH * STRIDE];
    const Index across = tiles(m), block = blockIdx.x;
    const Index row = block / across * TILE, column = block % across * TILE;
    T sums[ROWS][COLUMNS];
    distances<Family>(sums, tile_x, tile_y, x, y, row, column, n, m, d, true);

    const Index i = row + threadIdx.x / LANES * ROWS, j = column + threadIdx.x % LANES;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (i + r < n && j + c * LANES < m)
                out[offset(i + r, m, j + c * LANES)] = Family::value(sums[r][c], parameter);
}

// Blocks of matvec that one multiprocessor should hold: as many as leave every total in a register.
// Left to itself the compiler spills some to hold one block more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int NARROW_DOUBLE = 1;  // two would spill 8 bytes a thread there
#else
constexpr int NARROW_DOUBLE = 2;
#endif

template <class T, int WIDTH>
constexpr int RESIDENT = sizeof(T) == 4 ? (WIDTH <= 2 ? 3 : 2) : (WIDTH <= 2 ? NARROW_DOUBLE : 1);

// out (parts, n, t) with sum over parts = K(x, y) w, t <= WIDTH. Grid x: bands of TILE rows; grid
// y: parts of `span` tiles of columns, so that few rows still fill the device. The host adds the
// parts: no atomics, so the same call gives the same bits.
template <class Family, class T, int WIDTH>
__global__ void __launch_bounds__(THREADS, RESIDENT<T, WIDTH>)
    matvec(const T* __restrict__ x, const T* __restrict__ y, const T* __restrict__ w,
           T* __restrict__ out, Index n, Index m, Index d, Index t, Index span, T parameter) {
    __shared__ __align__(16) T shared[2 * DEPTH * STRIDE];
    __shared__ T weights[WIDTH][TILE];
    const int thread = threadIdx.x, lane = thread % LANES, band = thread / LANES * ROWS;
    const Index row = Index(blockIdx.x) * TILE, first = Index(blockIdx.y) * span * TILE;
    const Index last = first + span * TILE < m ? first + span * TILE : m;
    T* tile_x = shared;
    T* tile_y = shared + DEPTH * STRIDE;
    T totals[ROWS][WIDTH] = {};

    for (Index column = first; column < last; column += TILE) {
        T sums[ROWS][COLUMNS];
        __syncthreads();  // every thread is done with the weights of before
        for (int e = thread; e < WIDTH * TILE; e += THREADS) {
            const int s = e % WIDTH, c = e / WIDTH;
            weights[s][c] = s < t && column + c < m ? w[offset(column + c, t, s)] : T(0);
        }
        distances<Family>(sums, tile_x, tile_y, x, y, row, column, n, m, d, column == first);
        if (d == 0) __syncthreads();  // no tile was loaded, so nothing waited for the weights
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const T entry = Family::value(sums[r][c], parameter);
#pragma unroll
                for (int s = 0; s < WIDTH; ++s)
                    totals[r][s] += entry * weights[s][lane + c * LANES];
            }
    }

    for (int s = 0; s < WIDTH; ++s) {  // one right-hand side at a time through shared memory
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            T mine = T(0);  // totals[r][s] by constant indices: a variable one would spill
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) mine = k == s ? totals[r][k] : mine;
            shared[(band + r) * PITCH + lane] = mine;
        }
        __syncthreads();
        if (thread < TILE && row + thread < n && s < t) {
            T total = T(0);
            for (int k = 0; k < LANES; ++k) total += shared[thread * PITCH + k];
            out[offset(Index(blockIdx.y) * n + row + thread, t, s)] = total;
        }
    }
}

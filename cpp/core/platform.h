// What differs between the compilers that build the core: host compilers and nvcc.
#ifndef SOK_CORE_PLATFORM_H_
#define SOK_CORE_PLATFORM_H_

// Marks a function that host and device code share.
#ifdef __CUDACC__
#define SOK_HD __host__ __device__
#else
#define SOK_HD
#endif

// Number of zero bits below the lowest one; x must not be 0.
#ifdef __CUDA_ARCH__
#define SOK_CTZ(x) (__ffs(static_cast<int>(x)) - 1)
#else
#define SOK_CTZ(x) __builtin_ctz(x)
#endif

// Number of one bits.
#ifdef __CUDA_ARCH__
#define SOK_POPC(x) static_cast<uint32_t>(__popc(static_cast<int>(x)))
#else
#define SOK_POPC(x) static_cast<uint32_t>(__builtin_popcount(x))
#endif

#endif  // SOK_CORE_PLATFORM_H_

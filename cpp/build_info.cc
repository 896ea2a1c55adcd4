// What this library was built for, as text that can be read from the file without loading it.
//
// Loading runs static initialisers, which use the instructions this file was compiled for and
// symbols of the TensorFlow it was built against. So a check after loading comes too late: on the
// wrong machine the process has died of an illegal instruction, and with the wrong TensorFlow the
// error names a mangled symbol. `sok_like/runtime/native/libraries.py` finds the text below in the
// bytes of the file. Compiled into both libraries; instructions are named as in /proc/cpuinfo.

#ifndef SOK_TF_VERSION
#define SOK_TF_VERSION "none"
#endif

#ifdef __AVX__
#define SOK_AVX " avx"
#else
#define SOK_AVX ""
#endif
#ifdef __AVX2__
#define SOK_AVX2 " avx2"
#else
#define SOK_AVX2 ""
#endif
#ifdef __FMA__
#define SOK_FMA " fma"
#else
#define SOK_FMA ""
#endif
#ifdef __F16C__
#define SOK_F16C " f16c"
#else
#define SOK_F16C ""
#endif
#ifdef __BMI__
#define SOK_BMI1 " bmi1"
#else
#define SOK_BMI1 ""
#endif
#ifdef __BMI2__
#define SOK_BMI2 " bmi2"
#else
#define SOK_BMI2 ""
#endif
#ifdef __LZCNT__
#define SOK_LZCNT " abm"
#else
#define SOK_LZCNT ""
#endif
#ifdef __MOVBE__
#define SOK_MOVBE " movbe"
#else
#define SOK_MOVBE ""
#endif
#ifdef __AVX512F__
#define SOK_AVX512F " avx512f"
#else
#define SOK_AVX512F ""
#endif
#ifdef __AVX512BW__
#define SOK_AVX512BW " avx512bw"
#else
#define SOK_AVX512BW ""
#endif
#ifdef __AVX512VL__
#define SOK_AVX512VL " avx512vl"
#else
#define SOK_AVX512VL ""
#endif

// Visible and `used`, so that no linker drops it.
extern "C" __attribute__((visibility("default"), used)) const char sok_build_info[] =
    "sok_build_info{tensorflow=" SOK_TF_VERSION ";cpu=" SOK_AVX SOK_AVX2 SOK_FMA SOK_F16C SOK_BMI1
        SOK_BMI2 SOK_LZCNT SOK_MOVBE SOK_AVX512F SOK_AVX512BW SOK_AVX512VL "}";

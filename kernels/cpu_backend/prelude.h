/* What generated code calls; see scalars.py and elements.py for the names. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "run.h"

#define TC static inline __attribute__((always_inline))

/* A 1 that the compiler does not know. gcc 12 takes a vector of _Bool that is the index of a
   gather for a mask of 0 and -1, through all conversions and all that they can be simplified to. */
#define TC_ONE int32_t tc_one = 1; __asm__("" : "+r"(tc_one))

TC int64_t tc_min(int64_t a, int64_t b) { return a < b ? a : b; }
TC int64_t tc_clamp(int64_t a, int64_t n) { return a < 0 ? 0 : a > n ? n : a; }

/* faults: the first one is kept */
static __attribute__((noinline, cold)) int tc_report(
    const tc_run *run, const int32_t *pid, int argument, const char *p, const char *message, int place) {
    int32_t none = 0;
    if (__atomic_compare_exchange_n(&run->fault->found, &none, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        memcpy(run->fault->pid, pid, sizeof run->fault->pid);
        run->fault->argument = argument;
        run->fault->place = place;
        run->fault->address = p;
        run->fault->message = message;
    }
    return 0;
}
TC int tc_within(const tc_run *run, int argument, const char *p, int size) {
    const tc_range *range = run->ranges + argument;
    return !run->ranges || (p >= range->low && p + size <= range->high);
}
TC int tc_inside(const tc_run *run, const int32_t *pid, int argument, const char *p, int size, int place) {
    return tc_within(run, argument, p, size) || tc_report(run, pid, argument, p, 0, place);
}
static inline void tc_assert(const tc_run *run, const int32_t *pid, const char *message, int place) {
    tc_report(run, pid, -1, 0, message, place);
}

/* bits */
TC float tc_f(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
TC uint32_t tc_u(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
TC int32_t tc_bits_f32_i32(float x) { int32_t u; memcpy(&u, &x, 4); return u; }
TC float tc_bits_i32_f32(int32_t x) { float u; memcpy(&u, &x, 4); return u; }
TC int64_t tc_bits_f64_i64(double x) { int64_t u; memcpy(&u, &x, 8); return u; }
TC double tc_bits_i64_f64(int64_t x) { double u; memcpy(&u, &x, 8); return u; }

/* bfloat16 and float16 are held as float, always rounded */
TC float tc_from_bf16(uint16_t x) { return tc_f((uint32_t)x << 16); }
TC float tc_bf16(float x) {
    uint32_t u = tc_u(x);
    uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    return x != x ? x : tc_f(r);
}
TC uint16_t tc_to_bf16(float x) {
    uint32_t u = tc_u(x);
    return x != x ? (uint16_t)((u >> 16) | 0x40) : (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
TC float tc_bf16_rtz(float x) { return tc_f(tc_u(x) & 0xffff0000u); }
TC float tc_f16(float x) { return (float)(_Float16)x; }
TC int16_t tc_bits_bf16_i16(float x) { return (int16_t)(tc_u(x) >> 16); }
TC float tc_bits_i16_bf16(int16_t x) { return tc_from_bf16((uint16_t)x); }
TC int16_t tc_bits_f16_i16(float x) { _Float16 h = (_Float16)x; int16_t u; memcpy(&u, &h, 2); return u; }
TC float tc_bits_i16_f16(int16_t x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }

/* float8: e4m3fn (no infinity, saturating as cvt.rn.satfinite does) and e5m2 */
static float tc_e4m3_load(uint8_t x) {
    int s = x >> 7, e = (x >> 3) & 15, m = x & 7;
    float v = e == 15 && m == 7 ? NAN : e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
    return s ? -v : v;
}
static uint8_t tc_e4m3_store(float x) {
    uint8_t s = signbit(x) ? 0x80 : 0;
    float a = fabsf(x);
    if (x != x) return s | 0x7f;
    if (a >= 448.f) return s | 0x7e;
    if (a < 0x1p-6f) { int q = (int)rintf(a * 0x1p9f); return s | (uint8_t)q; }
    int e; frexpf(a, &e); e -= 1;
    int q = (int)rintf(ldexpf(a, 3 - e));
    if (q == 16) { q = 8; e += 1; }
    if (e > 8 || (e == 8 && q == 15)) return s | 0x7e;
    return s | (uint8_t)(((e + 7) << 3) | (q - 8));
}
static float tc_e4m3(float x) { return tc_e4m3_load(tc_e4m3_store(x)); }
TC float tc_e5m2_load(uint8_t x) { return tc_bits_i16_f16((int16_t)(x << 8)); }
static uint8_t tc_e5m2_store(float x) {
    uint16_t h = (uint16_t)tc_bits_f16_i16(x);
    if (x != x) return (h >> 8) | 2;
    uint16_t r = h + 0x7f + ((h >> 8) & 1);
    return (uint8_t)(r >> 8);
}
static float tc_e5m2(float x) { return tc_e5m2_load(tc_e5m2_store(x)); }

/* integers: division by zero and overflow do not trap, shifts take the count modulo the width */
#define TC_INT(T, U, S, BITS)                                                                \
    TC T tc_divsi_##S(T a, T b) { return b == 0 ? 0 : b == -1 ? (T)(0 - (U)a) : (T)(a / b); }    \
    TC T tc_remsi_##S(T a, T b) { return b == 0 || b == -1 ? 0 : (T)(a % b); }                   \
    TC T tc_divui_##S(T a, T b) { return b == 0 ? 0 : (T)((U)a / (U)b); }                        \
    TC T tc_remui_##S(T a, T b) { return b == 0 ? 0 : (T)((U)a % (U)b); }                        \
    TC T tc_shli_##S(T a, T b) { return (T)((U)a << (b & (BITS - 1))); }                         \
    TC T tc_shrsi_##S(T a, T b) { return (T)(a >> (b & (BITS - 1))); }                           \
    TC T tc_shrui_##S(T a, T b) { return (T)((U)a >> (b & (BITS - 1))); }
TC_INT(int8_t, uint8_t, i8, 8)
TC_INT(int16_t, uint16_t, i16, 16)
TC_INT(int32_t, uint32_t, i32, 32)
TC_INT(int64_t, uint64_t, i64, 64)
TC int32_t tc_mulhi_i32(int32_t a, int32_t b) {
    return (int32_t)(((uint64_t)(uint32_t)a * (uint32_t)b) >> 32);
}
TC int64_t tc_mulhi_i64(int64_t a, int64_t b) {
    return (int64_t)(((unsigned __int128)(uint64_t)a * (uint64_t)b) >> 64);
}

/* exp and log without branches, so that gcc vectorizes them; within about one unit of the last place */
TC float tc_pow2i(int32_t n) { return tc_f((uint32_t)(n + 127) << 23); }
TC float tc_exp_poly(float r) {
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    return __builtin_fmaf(p * r, r, r) + 1.0f;
}
TC float tc_scale(float y, float n) {
    int32_t k = (int32_t)n, h = k >> 1;
    return y * tc_pow2i(h) * tc_pow2i(k - h);
}
TC float tc_expf(float x) {
    float c = x < -104.f ? -104.f : x;
    c = c > 89.f ? 89.f : c;
    float n = __builtin_rintf(c * 1.44269504088896341f);
    float r = __builtin_fmaf(n, -0.693359375f, c);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float y = tc_scale(tc_exp_poly(r), n);
    y = x > 88.722839f ? INFINITY : y;
    return x != x ? x : y;
}
TC float tc_exp2f(float x) {
    float c = x < -151.f ? -151.f : x;
    c = c > 129.f ? 129.f : c;
    float n = __builtin_rintf(c);
    float y = tc_scale(tc_exp_poly((c - n) * 0.693147180559945f), n);
    y = x >= 128.f ? INFINITY : y;
    return x != x ? x : y;
}
/* x = 2^e * (1 + f), sqrt(1/2) <= 1 + f < sqrt(2); log(1 + f) = f - z, with z returned */
TC float tc_log_parts(float x, float *e, float *f) {
    int tiny = x < 1.17549435e-38f;
    float y = tiny ? x * 8388608.f : x;
    int32_t u = tc_bits_f32_i32(y);
    int32_t k = (u - 0x3f3504f3) >> 23;
    *e = (float)(k - (tiny ? 23 : 0));
    float m = tc_bits_i32_f32(u - (k << 23)) - 1.0f;
    float p = 7.0376836292e-2f;
    p = __builtin_fmaf(p, m, -1.1514610310e-1f);
    p = __builtin_fmaf(p, m, 1.1676998740e-1f);
    p = __builtin_fmaf(p, m, -1.2420140846e-1f);
    p = __builtin_fmaf(p, m, 1.4249322787e-1f);
    p = __builtin_fmaf(p, m, -1.6668057665e-1f);
    p = __builtin_fmaf(p, m, 2.0000714765e-1f);
    p = __builtin_fmaf(p, m, -2.4999993993e-1f);
    p = __builtin_fmaf(p, m, 3.3333331174e-1f);
    *f = m;
    return m * m * __builtin_fmaf(p, m, -0.5f);
}
TC float tc_log_special(float x, float y) {
    y = x == INFINITY ? x : y;
    y = x == 0.f ? -INFINITY : y;
    return x < 0.f ? NAN : x != x ? x : y;
}
TC float tc_logf(float x) {
    float e, f, z = tc_log_parts(x, &e, &f);
    z = __builtin_fmaf(e, -2.12194440e-4f, z);
    return tc_log_special(x, __builtin_fmaf(e, 0.693359375f, f + z));
}
TC float tc_log2f(float x) {
    float e, f, z = tc_log_parts(x, &e, &f);
    return tc_log_special(x, __builtin_fmaf(f + z, 1.44269504088896341f, e));
}
TC float tc_rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
TC double tc_rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }

/* atomics */
#define TC_ATOMIC_INT(NAME, T, S, CALL) \
    TC T tc_atomic_##NAME##_##S(char *p, T v) { return (T)CALL((T *)p, v, __ATOMIC_SEQ_CST); }
#define TC_ATOMIC_CAS(NAME, T, I, S, EXPR)                                                        \
    TC T tc_atomic_##NAME##_##S(char *p, T v) {                                                   \
        I seen = __atomic_load_n((I *)p, __ATOMIC_SEQ_CST), want;                                 \
        T a, r;                                                                                   \
        do { memcpy(&a, &seen, sizeof a); r = (EXPR); memcpy(&want, &r, sizeof r); }              \
        while (!__atomic_compare_exchange_n((I *)p, &seen, want, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)); \
        return a;                                                                                 \
    }
#define TC_ATOMICS(T, U, S)                             \
    TC_ATOMIC_INT(add, T, S, __atomic_fetch_add)        \
    TC_ATOMIC_INT(and, T, S, __atomic_fetch_and)        \
    TC_ATOMIC_INT(or, T, S, __atomic_fetch_or)          \
    TC_ATOMIC_INT(xor, T, S, __atomic_fetch_xor)        \
    TC_ATOMIC_INT(exch, T, S, __atomic_exchange_n)      \
    TC_ATOMIC_CAS(max, T, T, S, a > v ? a : v)          \
    TC_ATOMIC_CAS(min, T, T, S, a < v ? a : v)          \
    TC_ATOMIC_CAS(umax, T, T, S, (U)a > (U)v ? a : v)   \
    TC_ATOMIC_CAS(umin, T, T, S, (U)a < (U)v ? a : v)   \
    TC T tc_cas_##S(char *p, T c, T v) {                \
        __atomic_compare_exchange_n((T *)p, &c, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); return c; }
TC_ATOMICS(int32_t, uint32_t, i32)
TC_ATOMICS(int64_t, uint64_t, i64)
TC_ATOMIC_CAS(fadd, float, uint32_t, f32, a + v)
TC_ATOMIC_CAS(fadd, double, uint64_t, f64, a + v)
TC_ATOMIC_CAS(exch, float, uint32_t, f32, v)
TC_ATOMIC_CAS(exch, double, uint64_t, f64, v)

/* libdevice */
#define __nv_isnanf(x) ((x) != (x))
#define __nv_isnand(x) ((x) != (x))
#define __nv_isinff(x) (__builtin_fabsf(x) == INFINITY)
#define __nv_isinfd(x) (__builtin_fabs(x) == INFINITY)
#define __nv_finitef(x) (__builtin_fabsf(x) < INFINITY)
#define __nv_isfinited(x) (__builtin_fabs(x) < INFINITY)
#define __nv_fast_expf tc_expf
#define __nv_fast_logf tc_logf
#define __nv_expf tc_expf
#define __nv_exp2f tc_exp2f
#define __nv_logf tc_logf
#define __nv_log2f tc_log2f
#define __nv_exp exp
#define __nv_exp2 exp2
#define __nv_log log
#define __nv_log2 log2
#define __nv_log1pf log1pf
#define __nv_log1p log1p
#define __nv_expm1f expm1f
#define __nv_expm1 expm1
#define __nv_tanhf tanhf
#define __nv_tanh tanh
#define __nv_sinf sinf
#define __nv_sin sin
#define __nv_cosf cosf
#define __nv_cos cos
#define __nv_powf powf
#define __nv_pow pow
#define __nv_erff erff
#define __nv_erf erf
#define __nv_rintf __builtin_rintf
#define __nv_rint __builtin_rint
#define __nv_roundf roundf
#define __nv_round round
#define __nv_floorf __builtin_floorf
#define __nv_floor __builtin_floor
#define __nv_ceilf __builtin_ceilf
#define __nv_ceil __builtin_ceil
#define __nv_truncf __builtin_truncf
#define __nv_trunc __builtin_trunc
#define __nv_fabsf __builtin_fabsf
#define __nv_fabs __builtin_fabs
#define __nv_sqrtf __builtin_sqrtf
#define __nv_sqrt __builtin_sqrt
#define __nv_rsqrtf tc_rsqrtf
#define __nv_rsqrt tc_rsqrt
#define __nv_fmaf __builtin_fmaf
#define __nv_fma __builtin_fma
#define __nv_fdiv_rn(a, b) ((a) / (b))
#define __nv_ddiv_rn(a, b) ((a) / (b))
#define __nv_fsqrt_rn __builtin_sqrtf
#define __nv_fmodf fmodf
#define __nv_fmod fmod
#define __nv_atan2f atan2f
#define __nv_lgammaf lgammaf
#define __nv_popc(x) __builtin_popcount(x)
#define __nv_popcll(x) __builtin_popcountll(x)
#define __nv_clz(x) ((x) ? __builtin_clz(x) : 32)
#define __nv_clzll(x) ((x) ? __builtin_clzll(x) : 64)
#define __nv_ffs(x) __builtin_ffs(x)
#define __nv_ffsll(x) __builtin_ffsll(x)
#define __nv_float_as_int tc_bits_f32_i32
#define __nv_int_as_float tc_bits_i32_f32
#define __nv_llrintf(x) ((int64_t)llrintf(x))

"""What operations of aten do, by their names without the underscore that stands for in place."""

from collections.abc import Callable

__all__ = [
    *("ACCUMULATING", "CASTS", "DIVISORS", "DOMAINS", "ELEMENTWISE", "EMPTY", "GROWING", "OVERWRITING", "PRODUCTS"),
    *("SOFTMAX", "SYMBOLS"),
]

EMPTY = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
CASTS = frozenset({"_to_copy", "copy", "fill", "to", "type_as"})
# Of what they write to, they read nothing.
OVERWRITING = frozenset(
    {"copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential", "log_normal"}
)
ELEMENTWISE = frozenset({"native_dropout", "rsub"})  # without torch's tag for it
# Of these an infinity in float64 proves that the result is large; others have poles.
GROWING = frozenset(
    {
        *("exp", "exp2", "expm1", "sinh", "cosh", "pow", "mul", "multiply", "add", "sub", "subtract", "rsub", "square"),
        *("div", "true_divide", "divide", "reciprocal", "addcmul", "addcdiv", "lerp"),
    }
)
SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"})
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot"})
ACCUMULATING = PRODUCTS | {
    *("addbmm", "addr", "convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution", "linear"),
    *("mkldnn_linear", "_grouped_mm", "_scaled_mm", "cumsum", "cumprod", "logcumsumexp", "native_layer_norm"),
    *("_fused_rms_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
    *(
        "native_group_norm",
        "mse_loss",
        "l1_loss",
        "binary_cross_entropy",
        "smooth_l1_loss",
        "huber_loss",
        "nll_loss_forward",
    ),
    *("nll_loss2d_forward", "_euclidean_dist", "_cdist_forward", "dist", "norm", "trace", "index_add", "scatter_add"),
    *("scatter_reduce", "segment_reduce", "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d"),
    *(
        "binary_cross_entropy",
        "_embedding_bag",
        "_fft_r2c",
        "_fft_c2c",
        "_fft_c2r",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
    ),
}
DIVISORS = {  # of which operand zero is none to divide by
    **dict.fromkeys(("div", "true_divide", "divide", "remainder", "fmod", "floor_divide"), "other"),
    **dict.fromkeys(("reciprocal", "rsqrt"), "self"),
    "addcdiv": "tensor2",
}
# Operations that have no value, or only an infinite one, outside of: for real numbers.
DOMAINS: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(("log", "log2", "log10"), (lambda x: x > 0, "has values above 0 only")),
    "log1p": (lambda x: x > -1, "has values above -1 only"),
    **dict.fromkeys(("sqrt", "rsqrt"), (lambda x: x >= 0, "has values from 0 on")),
    **dict.fromkeys(("acos", "asin"), (lambda x: abs(x) <= 1, "has values from -1 to 1")),
    "acosh": (lambda x: x >= 1, "has values from 1 on"),
    **dict.fromkeys(("atanh", "erfinv", "special_erfinv"), (lambda x: abs(x) < 1, "is finite between -1 and 1 only")),
    **dict.fromkeys(("logit", "special_ndtri"), (lambda x: 0 < x < 1, "is finite between 0 and 1 only")),
    **dict.fromkeys(("lgamma", "digamma", "polygamma"), (lambda x: x > 0 or x != int(x), "has a pole there")),
}
SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "true_divide": "/", "multiply": "*"}

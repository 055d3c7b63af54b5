"""Operators of torch that keep the records of a pass under `vmap` apart, by name: no other one runs in a pass.

`tests/privacy/test_independent.py` runs them on random arguments and compares records in different company.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: functions, methods and operators; those in place, whose name ends with "_", are meant, too
_NAMES = _names(
    """
    abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices adaptive_max_pool3d
    adaptive_max_pool3d_with_indices add addbmm addcdiv addcmul addmm addmv addr adjoint affine_grid
    affine_grid_generator all allclose alpha_dropout amax amin aminmax angle any arange arccos arccosh arcsin
    arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere as_strided_scatter as_subclass as_tensor asarray
    asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm
    bartlett_window batch_norm bernoulli bfloat16 bilinear binary_cross_entropy binary_cross_entropy_with_logits
    bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window
    block_diag bmm bool broadcast_shapes broadcast_tensors broadcast_to bucketize byte can_cast cartesian_prod cat
    cauchy cdist cdouble ceil celu cfloat chain_matmul chalf channel_shuffle char cholesky cholesky_inverse
    cholesky_solve chunk clamp clamp_max clamp_min clip clone col2im column_stack combinations complex concat
    concatenate conj conj_physical constant_pad_nd contiguous conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d convolution copy copysign corrcoef cos cosh cosine_embedding_loss
    cosine_similarity count_nonzero cov cpu cross cross_entropy cross_entropy_loss ctc_loss cuda cummax cummin
    cumprod cumsum cumulative_trapezoid deg2rad det detach diag diag_embed diagflat diagonal diagonal_scatter diff
    digamma dim dim_order dist div divide dot double dropout dropout1d dropout2d dropout3d dsplit dstack einsum
    element_size elu embedding embedding_bag empty empty_like empty_strided eq equal erf erfc erfinv exp exp2 expand
    expand_as expm1 exponential eye fake_quantize_per_channel_affine fake_quantize_per_tensor_affine
    feature_alpha_dropout feature_dropout fill fill_diagonal fix flatten flex_attention flip fliplr flipud float
    float_power floor floor_divide fmax fmin fmod fold frac fractional_max_pool2d fractional_max_pool2d_with_indices
    fractional_max_pool3d fractional_max_pool3d_with_indices frexp frobenius_norm from_numpy full full_like gather
    gaussian_nll_loss gcd ge gelu geometric ger get_device glu grad gradient greater greater_equal grid_sample
    grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gt gumbel_softmax half hamming_window
    hann_window hardshrink hardsigmoid hardswish hardtanh heaviside hinge_embedding_loss histc hsplit hstack
    huber_loss hypot i0 igamma igammac im2col imag index index_add index_copy index_fill index_put index_reduce
    index_select inner instance_norm int interpolate inverse is_autocast_enabled is_complex is_conj is_contiguous
    is_distributed is_floating_point is_inference is_neg is_nonzero is_pinned is_same_size is_shared is_signed
    is_tensor isclose isfinite isin isinf isnan isneginf isposinf isreal istft item kaiser_window kl_div kron
    kthvalue l1_loss layer_norm lcm ldexp le leaky_relu lerp less less_equal lgamma linear linear_cross_entropy
    linspace local_response_norm log log10 log1p log2 log_normal log_sigmoid log_softmax logaddexp logaddexp2
    logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logspace logsumexp long lp_pool1d
    lp_pool2d lp_pool3d lstm lstm_cell lt lu lu_solve lu_unpack margin_ranking_loss masked_fill masked_scatter
    masked_select matmul matrix_exp matrix_power max max_pool1d max_pool1d_with_indices max_pool2d
    max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d maximum mean
    median meshgrid min minimum mish mm mode moveaxis movedim mse_loss msort mul multi_head_attention_forward
    multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss multinomial multiply mv mvlgamma nan_to_num
    nanmean nanmedian nanquantile nansum narrow native_channel_shuffle native_dropout native_group_norm
    native_layer_norm ndimension ne neg negative nelement new_empty new_full new_ones new_tensor new_zeros nextafter
    nll_loss nll_loss2d nll_loss_nd nonzero nonzero_static norm norm_except_dim normal normalize not_equal
    nuclear_norm numel one_hot ones ones_like orgqr ormqr outer pad pairwise_distance pdist permute pinverse
    pixel_shuffle pixel_unshuffle poisson_nll_loss polar polygamma positive pow prelu prod qr quantile rad2deg rand
    rand_like randint randint_like randn randn_like random randperm range ravel real reciprocal reflection_pad1d
    reflection_pad2d reflection_pad3d relu relu6 remainder renorm repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d requires_grad reshape reshape_as resolve_conj resolve_neg result_type
    rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round row_stack rrelu rsqrt rsub scalar_tensor
    scaled_dot_product_attention scatter scatter_add scatter_reduce searchsorted select select_scatter selu sgn
    short sigmoid sign signbit silu sin sinc sinh size slice_inverse slice_scatter slogdet smooth_l1_loss
    soft_margin_loss softmax softmin softplus softshrink softsign sort split split_with_sizes sqrt square squeeze
    stack std std_mean stft storage_offset sub subtract sum sum_to_size svd swapaxes swapdims sym_float sym_int
    sym_max sym_min sym_not t take take_along_dim tan tanh tanhshrink tensor tensor_split tensordot threshold tile
    to to_dense tolist topk trace transpose trapezoid trapz triangular_solve tril tril_indices triplet_margin_loss
    triplet_margin_with_distance_loss triu triu_indices true_divide trunc type type_as unbind unflatten unfold
    uniform unravel_index unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze upsample upsample_bicubic2d
    upsample_bilinear upsample_bilinear2d upsample_linear1d upsample_nearest upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d vander var var_mean vdot view view_as view_as_complex view_as_real
    vsplit vstack where xlogy zero zeros zeros_like
    """
)
#: libraries of functions whose rules were all tried
_LIBRARIES = ("linalg_", "fft_", "special_")
_UNLIKE = frozenset({"linalg_lstsq"})  # of these: equal records get other bits
_SPECIAL = _names(
    """
    __abs__ __add__ as_strided __and__ __bool__ __complex__ __contains__ __div__ __eq__ __float__ __floordiv__
    __format__ __ge__ __getitem__ __gt__ __hash__ __iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__
    __imul__ __index__ __int__ __invert__ __ior__ __ipow__ __irshift__ __isub__ __iter__ __itruediv__ __ixor__
    __le__ __len__ __long__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __nonzero__ __or__ __pos__
    __pow__ __radd__ __rand__ __rdiv__ __reversed__ __rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__
    __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __setitem__ __sub__ __truediv__ __xor__ _assert
    _assert_async _is_all_true _is_any_true _is_view _weight_norm _sym_sqrt _shape_as_tensor _dim_arange _softmax
    _log_softmax _scaled_dot_product_attention_math _masked_softmax _threshold _make_dual _unpack_dual
    _set_grad_enabled stride _scaled_dot_product_flash_attention_for_cpu
    """
)
#: attributes that may be asked for, and set
_ATTRIBUTES = _names(
    """
    H T data device dtype grad imag is_cpu is_cuda is_leaf is_meta is_mkldnn is_mps is_mtia is_nested is_quantized
    is_sparse is_sparse_csr is_xla is_xpu itemsize layout mH mT name names nbytes ndim output_nr real requires_grad
    retains_grad shape volatile
    """
)
_SET = frozenset({"grad", "imag", "real", "requires_grad"})
#: types of arguments that hold no code
_PLAIN = (
    *(bool, int, float, complex, str, range, type(None), type(...)),
    *(one for one in np.sctypeDict.values() if not issubclass(one, np.void | np.object_)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_NUMBERS = (bool, int, float, complex)
_KINDS_OF_TENSORS = tuple(
    one for name, one in vars(torch).items() if name.endswith("Tensor") and isinstance(one, type) and name != "Tensor"
)
_RETURNED = tuple(one for one in vars(torch.return_types).values() if isinstance(one, type) and issubclass(one, tuple))
#: types of tensors whose operators run no code of a user
TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_TENSOR_IDS, _OF_TENSORS = frozenset(map(id, TENSORS)), frozenset(dir(torch.Tensor))
_PLAIN_IDS = frozenset(map(id, _PLAIN))  # a metaclass may say that a class equals another


def keeps_records_apart(func: Any, name: str) -> bool:
    """Return whether a function of torch, of this name, is known to do so; of an attribute, to get or to set it."""
    if name in ("__get__", "__set__"):
        return attribute_of(func) in (_ATTRIBUTES if name == "__get__" else _SET)
    if name.startswith(_LIBRARIES):
        return name not in _UNLIKE
    return name.removesuffix("_") in _NAMES or name in _SPECIAL


def attribute_of(func: Any) -> str:
    """Return the name of the attribute that a function gets or sets, "" for other functions."""
    return getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ in ("__get__", "__set__") else ""


def not_plain(values: Iterable[Any]) -> Any:
    """Return the first argument that could run a user's code within an operator, None if there is none."""
    for value in values:
        kind = type(value)
        if id(kind) in _TENSOR_IDS:
            if vars(value).keys() & _OF_TENSORS:  # a function in place of a method
                return value
            continue
        if id(kind) in _PLAIN_IDS or any(value is one for one in _NUMBERS):
            continue
        if kind is np.ndarray and not value.dtype.hasobject:
            continue
        if any(value is one for one in _KINDS_OF_TENSORS):
            continue
        if kind is tuple or kind is list or kind is torch.Size or any(kind is one for one in _RETURNED):
            found = not_plain(value)
        elif kind is dict:
            found = not_plain((*value, *value.values()))
        elif kind is slice:
            found = not_plain((value.start, value.stop, value.step))
        else:
            found = value
        if found is not None:
            return found
    return None

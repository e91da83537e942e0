"""The operations of PyTorch for which the vendor's bridge has a kernel; anything else runs on the host, with a copy each way.

Source: gaudi-pytorch-bridge 1.19.0 of 2025-01-17 (commit 5a56187): the keys of ``scripts/hpu_op.yaml``, ``scripts/ops_list/ops.hpu``
and the registrations in ``habana_eager``, ``habana_lazy`` and ``habana_kernels``. Names without overloads; backward and ``_foreach``
operations, which no engine runs, are left out, and so are operations that PyTorch composes of others.
"""

from __future__ import annotations

__all__ = ["KERNELS", "STABLE_SORT_LIMIT"]

STABLE_SORT_LIMIT = 37
"""Longest dimension that a stable sort takes on the device. Source: ``hpu_ops/backend/sort_gen.cpp``, ``shouldFallback``."""

_NAMES = """
__ilshift__ __irshift__ __lshift__ __rshift__ _adaptive_avg_pool2d _adaptive_avg_pool3d _add_relu _add_relu_ _addmm_activation
_aminmax _assert_async _cdist_forward _copy_from _copy_from_and_resize _ctc_loss _efficientzerotensor _fused_dropout
_index_put_impl_ _local_scalar_dense _log_softmax _logcumsumexp _masked_scale _native_batch_norm_legit
_native_batch_norm_legit_functional _native_batch_norm_legit_no_training _pdist_forward _pin_memory _prelu_kernel
_reshape_alias _resize_output_ _scaled_mm _softmax _unique _unique2 _unsafe_view _upsample_nearest_exact1d
_weight_norm_interface abs abs_ acos acos_ acosh acosh_ adaptive_avg_pool2d adaptive_avg_pool3d add add_ addbmm addbmm_
addcdiv addcdiv_ addcmul addcmul_ addmm addmm_ addmv addmv_ addr addr_ alias all amax amin aminmax any arange argmax argmin
as_strided as_strided_ asin asin_ asinh asinh_ atan atan2 atan2_ atan_ atanh atanh_ avg_pool2d avg_pool3d baddbmm baddbmm_
batch_norm_elemt batch_norm_gather_stats_with_counts batch_norm_stats bernoulli bernoulli_ binary_cross_entropy
binary_cross_entropy_with_logits bincount bitwise_and bitwise_and_ bitwise_left_shift bitwise_left_shift_ bitwise_not
bitwise_not_ bitwise_or bitwise_or_ bitwise_right_shift bitwise_right_shift_ bitwise_xor bitwise_xor_ bmm bucketize cat cdist
ceil ceil_ channel_shuffle cholesky clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clone complex constant_pad_nd
convolution convolution_overrideable copy_ copysign copysign_ cos cos_ cosh cosh_ count_nonzero cumprod cumprod_ cumsum
cumsum_ diag div div_ dot dropout elu elu_ embedding embedding_renorm embedding_renorm_ empty empty_strided eq eq_ equal erf
erf_ erfc erfc_ erfinv erfinv_ exp exp2 exp2_ exp_ expand expm1 expm1_ exponential exponential_ eye fill fill_ flip floor
floor_ floor_divide floor_divide_ fmax fmin fmod fmod_ frac frac_ frexp full gather ge ge_ gelu gelu_ geometric geometric_ glu
grid_sampler_2d grid_sampler_3d gt gt_ hardshrink hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ heaviside
heaviside_ huber_loss hypot hypot_ index index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_reduce
index_select instance_norm is_pinned isfinite isin isinf isnan isneginf isposinf kl_div kthvalue le le_ leaky_relu leaky_relu_
lerp lerp_ lgamma lift_fresh_copy linalg_cholesky_ex linalg_cross linalg_vector_norm linear linspace log log10 log10_ log1p
log1p_ log2 log2_ log_ log_normal_ log_sigmoid_forward logaddexp logaddexp2 logcumsumexp logical_and logical_and_ logical_not
logical_not_ logical_or logical_or_ logical_xor logical_xor_ logit logit_ logspace lt lt_ masked_fill masked_fill_
masked_scatter masked_scatter_ masked_select matmul max max_pool2d_with_indices max_pool3d_with_indices maximum mean median
min minimum mish mish_ mm mse_loss mul mul_ multi_margin_loss multilabel_margin_loss_forward multinomial mv nan_to_num
nan_to_num_ nansum native_batch_norm native_dropout native_group_norm native_layer_norm ne ne_ neg neg_ new_zeros nextafter
nextafter_ nll_loss2d_forward nll_loss_forward nonzero norm normal normal_ one_hot permute pin_memory pixel_shuffle poisson
pow pow_ prod put put_ quantize_per_channel quantize_per_tensor random_ randperm reciprocal reciprocal_ reflection_pad1d
reflection_pad2d reflection_pad3d relu relu_ remainder remainder_ repeat repeat_interleave replication_pad1d replication_pad2d
replication_pad3d resize_ rms_norm roll round round_ rrelu_with_noise rrelu_with_noise_ rsqrt rsqrt_ rsub scalar_tensor
scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ searchsorted select set_ sgn sgn_ sigmoid sigmoid_
sign sign_ signbit silu silu_ sin sin_ sinc sinc_ sinh sinh_ slice smooth_l1_loss softmax softplus softshrink sort
special_entr special_erfcx special_xlog1py split split_with_sizes sqrt sqrt_ squeeze squeeze_ std std_mean sub sub_ sum t take
tan tan_ tanh tanh_ threshold threshold_ topk trace transpose tril tril_ tril_indices triu triu_ triu_indices trunc trunc_
unbind uniform_ unique_dim unsqueeze unsqueeze_ upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_trilinear3d var var_mean vdot view where xlogy xlogy_ zero_
"""

KERNELS = frozenset(_NAMES.split())

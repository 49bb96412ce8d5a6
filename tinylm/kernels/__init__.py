"""Code that depends on the processor or on private names of torch, each part with a portable fallback.

Every module checks for the private names that it needs, when it is imported or called, and uses its fallback if this
version of torch lacks them. Gains were measured on one or two cores of an AMD EPYC or an Intel Xeon; the numbers in
parentheses are the decision records of the measurements.

module             | needs                                     | gain                               | fallback
------------------ | ----------------------------------------- | ---------------------------------- | ------------------
layers, oneDNN     | CPU with AVX-512, but not Intel's, or no  | a training step takes 0.66 times   | `F.linear` (MKL)
                   | MKL; fp32, at least 32 rows,              | as long (013)                      |
                   | `torch.ops.mkldnn._linear_pointwise`      |                                    |
layers, fp32       | x86 CPU without instructions for a 16-bit | evaluating a bf16 model: 740 ->    | products in 16
                   | format, its weights, at least 32 rows     | 3,500 tokens/s (038)               | bits
layers, attention  | CPU, in training: up to 512 keys in bf16, | 13,000 -> 25,500 tokens/s (010)    | fused attention
                   | or attention dropout                      |                                    |
layers, RMSNorm    | CPU, in training,                         | 0.55 -> 0.27 ms; with short        | `F.rms_norm`
                   | `torch.ops.aten.                          | attention 31,600 -> 48,600         |
                   | native_layer_norm_backward`               | tokens/s (010)                     |
layers, dropout    | CPU                                       | 1.17 to 1.41 times the tokens/s    | `F.dropout`
                   |                                           | of training with dropout (005)     |
graphs, CUDA       | CUDA                                      | both passes of a small model take  | the same calls,
                   |                                           | 1.8 instead of 15 ms (041)         | one by one
graphs, compiler   | wrappers of `torch.optim` methods that    | first loss after 1.8 s instead of  | the methods with
                   | `inspect.unwrap` removes;                 | 3.9 s (018)                        | their wrappers;
                   | `Module._compiled_call_impl`, to discard  |                                    | compiled code runs
                   | compiled code                             |                                    | eagerly
cpu, features      | `torch.cpu.get_capabilities`, or in older | fp32 on CPUs where bf16 has 0.55   | fp32; Intel CPUs
                   | versions `torch.cpu._is_*_supported`      | of its speed; MKL on Intel's (015) | by /proc/cpuinfo
cpu, placement     | Linux, GNU libgomp                        | 4,000 -> 12,000 tokens/s beside a  | all cores
                   |                                           | busy process (042)                 |
process, OpenMP    | Linux, GNU libgomp                        | 10,000 -> 17,600 tokens/s where    | no spinning
                   |                                           | threads wake slowly (015)          |
process, malloc    | Linux, glibc's `mallopt`                  | short runs take 0.8 to 0.95 times  | the C library's
                   |                                           | as long (036); a sharded rank      | own thresholds
                   |                                           | needs less than a replica (028)    |
process, caches    | `torch._inductor.codecache._HEADER_DIR`,  | security: other users cannot write | no precompiled
                   | `_HEADER_LOCK_DIR`                        | to the compilers' caches (020)     | headers
"""

"""Faults at the front door, in models, and in what measures."""

from __future__ import annotations

from tools.mutants.fault import Change, Fault

USE = (
    Fault(
        "a-term-of-another-sign-is-replaced",
        "a module that computes something else is enabled, since nothing is compared",
        ("tests/cpu/test_structure.py::test_other_terms_are_left_alone",),
        (
            Change(
                "triton_relattn/integrations/structure", "agreed.append(proof.compare(name, ours, stock))", "agreed.append(0.0)"
            ),
            Change("triton_relattn/integrations/structure", "if not difference <= FLOAT32_LIMIT:", "if False:"),
        ),
    ),
    Fault(
        "dropout-is-not-compared",
        "a module that drops weights by itself is replaced by one that drops none",
        ("tests/cpu/test_structure.py::test_weights_that_the_forward_drops_by_itself",),
        (Change("triton_relattn/integrations/structure", "if dropout.noted != of.noted:", "if False:"),),
    ),
    Fault(
        "a-proof-of-another-source-is-remembered",
        "a class is enabled for a proof of its earlier source",
        ("tests/cpu/test_structure.py::test_proofs_are_remembered",),
        (
            Change(
                "triton_relattn/integrations/structure",
                "digest(source, sources.of_ours(), kind.__name__, state)",
                "digest(sources.of_ours(), kind.__name__, state)",
            ),
        ),
    ),
    Fault(
        "a-proof-is-taken-for-another-state",
        "a module is enabled for a proof of another one of its class, with other settings",
        ("tests/cpu/test_structure_state.py::test_another_module_is_proven_by_itself",),
        (
            Change(
                "triton_relattn/integrations/structure",
                "stock, state = type(module), name_of(state_of(module))",
                'stock, state = type(module), ""',
            ),
        ),
    ),
    Fault(
        "a-change-after-enable-goes-unnoticed",
        "a module is still computed by ours when its settings are no longer the proven ones",
        ("tests/cpu/test_structure_state.py::test_a_change_is_noticed",),
        (
            Change(
                "triton_relattn/integrations/structure", "if self.noted is None and not _is_in_state(self, module):", "if False:"
            ),
        ),
    ),
    Fault(
        "jagged-tensors-with-holes-are-taken-for-packed-ones",
        "rows of a cache that do not belong to a sequence are attended to",
        ("tests/cpu/test_jagged.py::test_sequences_that_do_not_belong_together_are_refused",),
        (Change("triton_relattn/_jagged.py", "if tensor.lengths() is not None:", "if False:"),),
    ),
    Fault(
        "a-call-without-a-proof-is-ours",
        "an argument that no proof has had is ignored",
        ("tests/cpu/test_structure.py::test_calls_that_were_not_proven_are_the_stock_class_s",),
        (
            Change(
                "triton_relattn/integrations/structure",
                "(key is None or key.shape == query.shape) and (mask is None or mask.dim() == 4)",
                "key is None or key.shape == query.shape",
            ),
        ),
    ),
    Fault(
        "a-mask-shows-what-it-hides",
        "masks of modules that were found by their structure mean the opposite",
        ("tests/cpu/test_structure.py::test_equal_modules_are_replaced",),
        (
            Change(
                "triton_relattn/integrations/structure",
                "mask if means == ADDED else mask != 0 if means == SHOWN else mask == 0",
                "mask if means == ADDED else mask == 0 if means == SHOWN else mask != 0",
            ),
        ),
    ),
    Fault(
        "another-layout-unnoticed",
        "tensors of flash-attn's layout with a short table are attended over heads, and nobody is told",
        ("tests/cpu/test_validation.py::test_a_doubtful_call_is_warned_of_once",),
        (Change("triton_relattn/_core", "return bool(ranks) and not has_heads", "return False"),),
    ),
    Fault(
        "a-gpu-gets-blockwise-silently",
        "nobody is told that the kernels do not serve a GPU",
        ("tests/cpu/test_imports.py::test_a_gpu_that_gets_blockwise_is_told_why",),
        (Change("triton_relattn/_implementations", "_warn_of_blockwise(reason)", ""),),
    ),
    Fault(
        "lock-empties-another-file",
        "where the lock file is a link, the file that it points to is emptied",
        ("tests/cpu/test_profiles.py::test_links_are_not_followed",),
        (Change("triton_relattn/kernels", '"ab", opener=_not_through_a_link)', '"wb")'),),
    ),
    Fault(
        "tangents-go-unnoticed",
        "forward mode gets zeros as derivatives where nothing has a gradient in reverse mode",
        ("tests/cpu/test_torch.py::test_no_forward_mode_goes_unnoticed",),
        (
            Change(
                "triton_relattn/_operators",
                """if forward_ad._current_level >= 0:
        return True""",
                "",
            ),
        ),
    ),
    Fault(
        "an-unknown-argument-is-swallowed",
        "a cache under a name of a later version is lost, and a decoder generates other tokens",
        ("tests/cpu/test_transformers_arguments.py::test_a_name_of_a_later_version",),
        (Change("triton_relattn/integrations", "if lost:", "if lost and not ignores:"),),
    ),
    Fault(
        "a-changed-stock-class-is-trusted",
        "a model of a version that nobody has tested is enabled without a comparison, and computes something else",
        ("tests/cpu/test_proof.py::test_a_change_that_matters_is_refused",),
        (Change("triton_relattn/integrations", "if not known.are_known(library.modules(*together)):", "if False:"),),
    ),
    Fault(
        "t5-decoder-has-an-encoders-buckets",
        "half of a decoder's buckets are kept for the future",
        (
            "tests/cpu/test_transformers.py::test_the_same_in_float64",
            "-k",
            "t5-whole",
        ),
        (
            Change(
                "triton_relattn/integrations",
                "self.relative_attention_max_distance, positions.last > 0",
                "self.relative_attention_max_distance, True",
            ),
        ),
    ),
    Fault(
        "offset-is-the-caches-counter",
        "with a static cache, queries stand where the next ones will",
        ("tests/cpu/test_transformers.py::test_parts_of_a_sequence_with_a_static_cache",),
        (
            Change(
                "triton_relattn/integrations", "return seen.clone() if isinstance(seen, torch.Tensor) else seen", "return seen"
            ),
        ),
    ),
    Fault(
        "a-users-mask-is-made-causal",
        "a mask (B, 1, Nq, Nk) that shows the future shows the past alone",
        ("tests/cpu/test_transformers_decoders.py::test_a_mask_of_the_users",),
        (Change("triton_relattn/integrations", "return not of_all and asked.get(", "return asked.get("),),
    ),
    Fault(
        "enabled-models-are-custom-code",
        "transformers saves an enabled model's weights under internal names",
        ("tests/cpu/test_transformers.py::test_what_the_whole_model_saves",),
        (
            Change(
                "triton_relattn/integrations",
                "def is_custom_code(cls) -> bool:",
                """def is_custom_code(cls) -> bool:
        return True""",
            ),
        ),
    ),
    Fault(
        "cycles-without-scoreboards",
        "loads are never waited for",
        ("tests/cpu/test_cycles.py::test_scoreboards",),
        (Change("tools/cycles", "if warp.scoreboards[number] > ready:", "if False:"),),
    ),
    Fault(
        "gpu-part-that-crashed-passes",
        "a part that crashed counts as one that passed",
        ("tests/cpu/test_gpu_parts.py::test_parts_are_judged_one_by_one",),
        (Change("bench/gpu", "elif not outcome.is_done or status != 0:", "elif not outcome.is_done and status == 0:"),),
    ),
    Fault(
        "gpu-wrong-variant-timed",
        "a configuration that computes something else is timed, and may look fast",
        ("tests/cpu/test_gpu_parts.py::test_a_configuration_that_computes_something_else_is_not_timed",),
        (Change("bench/gpu", 'if not row["error"] <= ALLOWED:', "if False:"),),
    ),
)

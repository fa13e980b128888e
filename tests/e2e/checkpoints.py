"""The checkpoints that the tests serve, by name."""

from demo.checkpoint.geometry import Geometry, geometry

#: 12 layers, QSA at 3, 7 and 11: three even stages have one QSA layer each.  PLE on layer 1 or on layer 5, counted
#: from zero, so on the first stage or, over three stages, on the second.
SHAPES: dict[str, Geometry] = {
    "ple-early": geometry("tiny", num_hidden_layers=12, ple_layer_ids=(2,)),
    "ple-late": geometry("tiny", num_hidden_layers=12, ple_layer_ids=(6,)),
    # Heads that two tensor-parallel ranks can share, and experts as wide as the CPU's kernels take them in halves.
    "two-ranks": geometry(
        "tiny", overrides=dict(linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=64)
    ),
}

#: Facts that the cuts are chosen by, and where each comes from.
INDEXER_BUDGET = 64
COMPRESS_RATIO = 4
#: (kernel size 4 - 1) x dilation, which is the n-gram size 3
PLE_CONV_STATE = 9
#: tokens before the current one that an n-gram reaches
NGRAM_CONTEXT = 2
END_OF_TEXT = 0

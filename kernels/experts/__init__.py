"""Grouped matmuls: each group of rows times a matrix of its own, as the experts of a mixture need them."""

from kernels.experts.choice import GroupedMatmul, GroupedMatmulChoice
from kernels.experts.copies import copy_rows, sum_copies
from kernels.experts.gated_kernels import GatedMatrices
from kernels.experts.gated_mlp import grouped_gated_mlp
from kernels.experts.multiply import choose_grouped_matmul, grouped_matmul
from kernels.experts.row_groups import RowGroups, group_rows, own_groups

__all__ = [
    "GatedMatrices",
    "GroupedMatmul",
    "GroupedMatmulChoice",
    "RowGroups",
    "choose_grouped_matmul",
    "copy_rows",
    "group_rows",
    "grouped_gated_mlp",
    "grouped_matmul",
    "own_groups",
    "sum_copies",
]

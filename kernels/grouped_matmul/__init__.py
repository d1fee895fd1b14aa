"""Grouped matmuls: each group of rows times a matrix of its own, as the experts of a mixture need them."""

from kernels.grouped_matmul.copies import copy_rows, sum_copies
from kernels.grouped_matmul.gated_mlp import GatedMatrices, grouped_gated_mlp
from kernels.grouped_matmul.multiply import GroupedMatmul, GroupedMatmulChoice, choose_grouped_matmul, grouped_matmul
from kernels.grouped_matmul.row_groups import RowGroups, group_rows, own_groups

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

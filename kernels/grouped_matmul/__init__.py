"""Grouped matmuls: each group of rows times a matrix of its own, as the experts of a mixture need them."""

from kernels.grouped_matmul.multiply import GroupedMatmulChoice, choose_grouped_matmul, grouped_matmul
from kernels.grouped_matmul.row_groups import RowGroups, group_rows

__all__ = ["GroupedMatmulChoice", "RowGroups", "choose_grouped_matmul", "group_rows", "grouped_matmul"]

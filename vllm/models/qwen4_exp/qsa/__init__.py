# SPDX-License-Identifier: Apache-2.0
"""Sparse attention (QSA) over K/V rows of two bytes or one; README.md derives it."""

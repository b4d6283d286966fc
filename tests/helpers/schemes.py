# SPDX-License-Identifier: Apache-2.0
"""The schemes of products, under short names, and what makes their problems."""

import pblasmp as pb

AG, RS, AR = SCHEMES = "allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"
MAKERS = {scheme: getattr(pb.MatmulProblem, scheme) for scheme in SCHEMES}

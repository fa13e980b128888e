"""Before anything else imports Triton: vLLM decides whether it is interpreted, and Triton reads that once."""

import vllm.triton_utils  # noqa: F401

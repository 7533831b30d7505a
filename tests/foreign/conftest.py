"""Marks that transformers' tests carry, and that our strict settings do not know."""

MARKS = ("accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "torch_compile_test", "order")


def pytest_configure(config):
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: of transformers")
    for kind in ("staging", "pipeline", "training", "tensor_parallel", "fsdp", "expert_parallel", "agent"):
        config.addinivalue_line("markers", f"is_{kind}_test: of transformers")

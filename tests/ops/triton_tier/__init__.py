import pytest

pytest.register_assert_rewrite("tests.ops.smart_cast_suite")

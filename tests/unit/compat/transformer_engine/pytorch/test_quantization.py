import importlib
import threading

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from octavo.compat.transformer_engine import pytorch as te
from octavo.compat.transformer_engine.common.recipe import DelayedScaling, MXFP8BlockScaling
from octavo.compat.transformer_engine.pytorch.quantization import FP8GlobalStateManager as State


def test_the_state_is_the_innermost_blocks():
    assert not State.is_fp8_enabled()
    assert State.get_fp8_recipe() == DelayedScaling()
    group = ProcessGroup(HashStore(), 0, 1)
    with te.autocast(recipe=MXFP8BlockScaling(), amax_reduction_group=group):
        assert State.is_fp8_enabled()
        assert not State.is_fp8_calibration()
        assert (State.get_fp8_recipe(), State.get_fp8_group()) == (MXFP8BlockScaling(), group)
        with te.fp8_autocast(enabled=False, calibrating=True):
            assert (State.is_fp8_enabled(), State.is_fp8_calibration()) == (False, True)
        assert State.is_fp8_enabled()
    assert (State.is_fp8_enabled(), State.get_fp8_group()) == (False, None)
    assert not State.with_fp8_parameters()


def test_a_block_that_fails_is_left():
    with pytest.raises(ZeroDivisionError), te.autocast(calibrating=True, enabled=False):
        raise ZeroDivisionError
    assert not State.is_fp8_calibration()


def test_a_thread_has_blocks_of_its_own():
    found = []
    with te.autocast():
        thread = threading.Thread(target=lambda: found.append(State.is_fp8_enabled()))
        thread.start()
        thread.join()
    assert found == [False]


@pytest.mark.parametrize("name", ["fp8", "quantization"])
def test_fp8_and_quantization_modules_share_their_members(name):
    module = importlib.import_module(f"octavo.compat.transformer_engine.pytorch.{name}")
    assert module is getattr(te, name)
    assert module.FP8GlobalStateManager is State
    assert (module.fp8_autocast, module.fp8_model_init) == (te.fp8_autocast, te.fp8_model_init)
    assert module.check_fp8_support() == State.is_fp8_available() == (True, "")

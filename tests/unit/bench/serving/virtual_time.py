"""An event loop whose clock jumps to the next thing that is due: seconds pass at once, and exactly."""

import asyncio
import selectors

from octavo.bench.serving import Target


class _Jumping(selectors.SelectSelector):
    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now


def run(coroutine):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def target(seconds_a_token, *, weight_bytes=0):
    """Everybody is answered at once, however many they are."""

    async def ask(prompt):
        for _ in range(prompt.answer_tokens):
            await asyncio.sleep(seconds_a_token)
            yield 1

    return Target(ask=ask, weight_bytes=weight_bytes)

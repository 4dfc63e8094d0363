"""All checks of a healthy configuration, in order, with remedies where something is found."""

from octavo.experiments import preflight


def test_a_healthy_configuration_passes_every_check(origin):
    made: list[int] = []
    checks = list(preflight(origin, steps=2, on_run=made.append))
    assert [check.name for check in checks] == ["checkpoint", "memory", "replay", "ranks", "shapes", "gap to BF16"]
    assert {finding.severity for check in checks for finding in check.findings} <= {"note", "warn"}
    assert made == [1, 2, 3, 4]

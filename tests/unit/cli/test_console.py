"""What the console prints of text that looks like rich's markup."""

from octavo.cli.console import complain, print_table


def test_brackets_in_a_table_are_no_markup(capsys):
    print_table("Data: runs/[red]x", ["a[bold]", "b"], [["path/[red]y", "[/]"]])
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("Data: runs/[red]x", "a[bold]", "path/[red]y", "[/]"))


def test_brackets_in_a_complaint_are_no_markup(capsys):
    complain("cannot use runs/[red]x")
    assert capsys.readouterr().err == "error: cannot use runs/[red]x\n"

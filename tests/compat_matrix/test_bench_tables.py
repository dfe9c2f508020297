"""README's figures of the bench say what the committed results say, for Transformers and for fa2patch alike."""

from compat_matrix.bench import about, figures
from compat_matrix.publish import bench_tables, tables


def test_reads_are_shown_with_and_without_lengths_on_both_sides():
    rows = [line.strip("| ").split(" | ") for line in bench_tables.reads().splitlines() if line.startswith("|")]
    assert rows[0][1:] == list(about.read(figures.HERE / "results" / "syncs.json")["versions"])
    cells = {row[0]: dict(zip(rows[0], row)) for row in rows[2:]}
    assert list(cells) == list(bench_tables.WAYS.values())
    given = cells["Transformers, with lengths"]
    assert (given["4.44.2"], given["4.57.6"], given["5.23.0"]) == ("refused", "0", "1")
    assert set(list(cells["fa2patch, with lengths"].values())[1:]) == {"0"}


def test_the_cost_per_forward_stands_beside_the_cost_per_layer():
    found = about.read(figures.HERE / "results" / "overhead.json")
    said = " ".join(bench_tables.overhead().split())
    for way in ("position_ids", "lengths"):
        for what in ("layer", "forward"):
            assert f"{found[way][f'us_per_{what}']:.0f} µs" in said


def test_readme_and_the_page_about_kernels_have_both():
    root = figures.HERE.parents[1]
    for file in (root / "README.md", root / "docs" / "kernels.md"):
        blocks = {"reads": bench_tables.reads(), "overhead": bench_tables.overhead()}
        assert tables.between(file, **blocks) == file.read_text(encoding="utf-8")

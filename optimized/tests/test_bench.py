from paged_mla_optimized.bench.cases import GROUPS, MAIN, Case
from paged_mla_optimized.bench.report import summary


def test_work_of_a_case():
    """S-5: two products over every key, each cached row read once."""
    case = Case("two rows", num_heads=16, query_len=2, seq_lens=(100, 28))
    assert case.flops == 2 * 16 * 2 * 128 * (576 + 512)
    assert case.bytes == 128 * 1152 + 2 * 2 * 16 * (576 + 512) * 2


def test_cases_have_names_of_their_own():
    """S-20: a table row names one case."""
    for cases in GROUPS.values():
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
    assert len(MAIN) == 12


def test_summary_is_geometric_means():
    """S-20: ratios multiply; cases without a peer do not count."""
    rows = [
        {"ratio": 2.0, "ratio_in_turns": 4.0},
        {"ratio": 0.5, "ratio_in_turns": 1.0},
        {"us": 1.0},
    ]
    assert summary(rows) == "geometric means over 2 cases: 1.000 alone, 2.000 in turns"

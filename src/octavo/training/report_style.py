"""The report's page: its structure and style, with ``string.Template`` places for what a study fills in."""

from octavo.pages import page_template

__all__ = ["PAGE"]

STYLE = """
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; }
.card { background: var(--sheet); border: 1px solid var(--rule); border-top: 4px solid var(--accent);
  border-radius: 6px; padding: 14px 18px 12px; }
.card .name { font-weight: 600; color: var(--accent); }
.card .figure { font-size: 32px; line-height: 1.25; font-variant-numeric: tabular-nums; letter-spacing: -.01em; }
.card .unit { color: var(--muted); font-size: 13.5px; }
table { width: 100%; border-collapse: collapse; background: var(--sheet); border: 1px solid var(--rule);
  border-radius: 6px; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 9px 11px; text-align: right; border-bottom: 1px solid var(--rule); vertical-align: baseline; }
thead th { font-size: 13px; color: var(--muted); font-weight: 600; }
tbody th { text-align: left; font-weight: 500; }
td { white-space: nowrap; }
td:last-child, thead th:last-child { color: var(--muted); }
td:nth-last-child(2) { font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
.note { font-size: 14.5px; color: #454b54; border-left: 3px solid #d9480f; padding: 2px 0 2px 14px; margin: 16px 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 5px 22px; margin: 10px 0 0; font-size: 14.5px; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 14px 0 0; }
figcaption { font-size: 13px; color: var(--muted); margin-bottom: 4px; }
pre { margin: 0; background: #24272e; color: #e6e4df; border-radius: 6px; padding: 14px 16px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre b { color: #ffb38a; font-weight: 600; }
@media (max-width: 700px) {
  thead { display: none; }
  table, tbody, tr, tbody th, td { display: block; border: 0; }
  table { border: 1px solid var(--rule); }
  tr { padding: 10px 14px; border-bottom: 1px solid var(--rule); }
  tbody th, td { padding: 2px 0; text-align: left; white-space: normal; }
  tbody th { font-weight: 600; }
  td::before { content: attr(data-label); display: inline-block; width: 46%; padding-right: 10px; color: var(--muted);
    vertical-align: top; font-weight: 400; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 8px; }
}
"""

BODY = """
<script>$script</script>
<main>
<p class="eyebrow">octavo study</p>
<h1>$headline</h1>
<p class="standfirst">$standfirst</p>
<section class="cards">$cards</section>
<h2>Loss</h2>
<p class="caption">Cross-entropy in nats a token. Thin: training loss, smoothed. Points: validation text.</p>
<p class="legend">$loss_legend</p>
<div class="plot">$loss_figure</div>
<h2>Gap</h2>
<p class="caption">How much more one run loses than another at the same step, on the same tokens. Points: validation
text. Thin: training batches, smoothed. Green: within $gap_bar nats.</p>
<p class="legend">$gap_legend</p>
<div class="plot">$gap_figure</div>
<h2>Measures</h2>
<p class="caption">$yardstick $target_note</p>
$table
<p class="note">$emulation_note</p>
<h2>Setting</h2>
<dl>$facts</dl>
<h2>What the models write</h2>
<p class="caption">The prompt is in colour; the rest is sampled.</p>
$samples
</main>
"""

PAGE = page_template("octavo study", style=STYLE, body=BODY)

"""The sensitivity page: its structure and style, with ``string.Template`` places for what a study fills in."""

from octavo.pages import page_template

__all__ = ["PAGE"]

STYLE = """
h3 { font-size: 15.5px; margin: 22px 0 6px; font-weight: 600; }
.said p { margin: 0 0 6px; max-width: 62em; }
.wide { overflow-x: auto; max-height: 620px; overflow-y: auto; border: 1px solid var(--rule); border-radius: 6px; }
table { width: 100%; border-collapse: collapse; background: var(--sheet); font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 6px 11px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { position: sticky; top: 0; background: var(--sheet); font-size: 13px; color: var(--muted); font-weight: 600; }
tbody th, thead th:first-child { text-align: left; font-weight: 500; }
td:last-child { white-space: normal; min-width: 15em; }
tbody tr:last-child > * { border-bottom: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 5px 22px; margin: 10px 0 0; font-size: 14.5px; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
"""

BODY = """
<script>$script</script>
<main>
<p class="eyebrow">octavo sensitivity</p>
<h1>$headline</h1>
<p class="standfirst">$standfirst</p>
<div class="said">$notes</div>
<h2>Bytes against perplexity</h2>
<p class="caption">Every point is measured on text that it was not chosen on; bars are one standard error over windows.
Bytes are codes and scales of what is FP8, and two an element of the rest, embedding and norms included.</p>
<p class="legend">$front_legend</p>
<div class="plot">$front</div>
<h2>What layers cost</h2>
<p class="caption">Each layer alone in FP8, everything else in BF16: the increase of the loss, stacked by block:
estimated, or measured where the layer was run alone.</p>
<p class="legend">$role_legend</p>
$bars
<h2>The mix</h2>
<p class="caption">What each layer became.</p>
<p class="legend">$map_legend</p>
$map
<h2>Every layer</h2>
<p class="caption">Thousandths of a nat a token, the costliest first: estimated, or measured where the last column says
so.</p>
<div class="wide">$table</div>
<h2>Setting</h2>
<dl>$facts</dl>
</main>
"""

PAGE = page_template("octavo sensitivity", style=STYLE, body=BODY)

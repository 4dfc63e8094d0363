"""The page: its structure and style, with ``string.Template`` places for what a run fills in."""

from octavo.pages import page_template

__all__ = ["PAGE"]

STYLE = """
:root { --fail: #a3260f; --warn: #8a5a00; --note: #475569; --focus: #0072b2; }
main { max-width: 1140px; }
[hidden] { display: none !important; }
h3 { font-size: 14.5px; font-weight: 600; margin: 0; }
code { font: .93em/1.4 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
a { color: var(--focus); }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; border-radius: 3px; }
ol { list-style: none; margin: 14px 0 0; padding: 0; display: grid; gap: 12px; }
summary { cursor: pointer; margin-top: 14px; color: var(--focus); }
.finding { background: var(--sheet); border: 1px solid var(--rule); border-left: 4px solid var(--accent);
  border-radius: 6px; padding: 13px 18px 15px; scroll-margin: 12px; }
.fail { --accent: var(--fail); } .warn { --accent: var(--warn); } .note { --accent: var(--note); }
.finding.chosen { box-shadow: 0 0 0 2px var(--focus); }
.finding p { margin: 0; }
.kind { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 12px; font-size: 14px; }
.severity { color: var(--accent); font-weight: 600; text-transform: uppercase; letter-spacing: .06em;
  font-size: 12.5px; }
.severity i { font-style: normal; font-size: 10px; vertical-align: 1px; }
.show { margin-left: auto; }
.place { color: var(--muted); font-size: 14px; overflow-wrap: anywhere; }
.finding .cause { margin-top: 5px; max-width: 62em; }
.evidence { display: flex; flex-wrap: wrap; gap: 2px 26px; margin: 8px 0 0; font-size: 13.5px; }
.evidence div { display: flex; gap: 7px; }
dt { color: var(--muted); } dd { margin: 0; font-variant-numeric: tabular-nums; }
.remedies { width: 100%; border-collapse: collapse; margin-top: 12px; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
.remedies th, .remedies td { text-align: left; font-weight: 400; padding: 5px 14px 5px 0; vertical-align: baseline;
  border-top: 1px solid var(--rule); }
.remedies thead th { color: var(--muted); font-size: 12.5px; border-top: 0; }
.remedies td { white-space: nowrap; width: 152px; }
.remedies tbody tr:first-child th { font-weight: 600; }
.bar { display: inline-block; position: relative; width: 78px; height: 9px; margin-right: 8px; background: #eeece6;
  border-radius: 2px; overflow: hidden; }
.bar i { position: absolute; inset: 0 auto 0 0; border-radius: 2px; }
.gain i { background: #0072b2; } .cost i { background: #a8a39a; }
.cost::after { content: ""; position: absolute; left: 50%; top: 0; bottom: 0; border-left: 1px solid var(--ink); }
.controls { display: flex; flex-wrap: wrap; gap: 10px 18px; margin: 12px 0 10px; }
.controls label { display: grid; gap: 3px; font-size: 12.5px; color: var(--muted); min-width: 0; }
select { font: 15px/1.3 inherit; font-family: inherit; color: var(--ink); background: var(--sheet); padding: 7px 9px;
  border: 1px solid #cbc7bd; border-radius: 5px; min-width: 170px; max-width: min(100%, 430px); }
.plot.short { height: 340px; } .plot.lower { height: 210px; margin-top: 10px; }
.plot > div { height: 100%; } .plot.map > div { height: auto; }
.plot p { color: var(--muted); margin: 0; padding: 2px 12px 8px; }
.plot:has(p), .plot.short:has(p), .plot.lower:has(p) { height: auto; }
#map { scroll-margin: 12px; }
.map { position: relative; padding: 10px 8px 4px; height: auto; }
.about { display: flex; flex-wrap: wrap; gap: 0 22px; font-size: 14px; margin: 0 0 10px; }
.about b { font-weight: 600; }
.tip { position: absolute; z-index: 5; pointer-events: none; max-width: 330px; background: #24272e; color: #f4f2ec;
  border-radius: 5px; padding: 7px 11px; font-size: 13px; line-height: 1.45; overflow-wrap: anywhere;
  box-shadow: 0 3px 12px rgb(0 0 0 / .18); }
.tip b { display: block; font-size: 15px; font-variant-numeric: tabular-nums; }
.tip span { color: #c9c6be; }
.layer { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 16px; margin: 24px 0 4px; }
.layer h2 { margin: 0; overflow-wrap: anywhere; }
.layer p { margin: 0; color: var(--muted); font-size: 14.5px; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px; }
.panel { background: var(--sheet); border: 1px solid var(--rule); border-radius: 6px; padding: 11px 12px 2px;
  min-width: 0; }
.panel p { margin: 0; color: var(--muted); font-size: 12.5px; min-height: 1.6em; }
.panel div { height: 190px; }
.dots span::before { background: repeating-linear-gradient(90deg, var(--accent) 0 3px, transparent 3px 6px); }
@media (max-width: 700px) {
  .remedies thead { display: none; } .remedies, .remedies tbody, .remedies tr, .remedies th, .remedies td {
    display: block; border: 0; padding: 1px 0; width: auto; }
  .remedies tr { border-top: 1px solid var(--rule); padding: 6px 0; }
  .remedies td::before { content: attr(data-label); display: inline-block; width: 9em; color: var(--muted); }
  .show { margin-left: 0; } .plot.short { height: 280px; } select { max-width: 100%; }
}
"""

BODY = """
<main>
<p class="eyebrow">octavo doctor · $title</p>
<h1>$headline</h1>
<p class="standfirst">$standfirst</p>
<section id="findings" aria-label="Findings">$findings</section>
<h2>Loss</h2>
<p class="caption">Cross-entropy in nats a token: every step (faint), smoothed, and on validation text (points).</p>
<p class="legend">$loss_legend</p>
<div class="plot short"><div id="loss">$loss</div></div>
<div class="plot lower"><div id="gap" aria-label="Gap to the reference run">$gap</div></div>
<h2 id="map">Every layer, step by step</h2>
<p class="caption">$map_note</p>
<div class="controls">
<label>Statistic<select id="statistic"></select></label>
<label>Tensor<select id="sheet"></select></label>
<label>Layer<select id="layer"></select></label>
</div>
<p class="about" id="about"></p>
<div class="plot map" id="map-frame">$map<div id="heat" tabindex="0" role="application"
aria-label="Heat map of layers and steps; arrow keys move from cell to cell" aria-describedby="readout"></div>
<div class="tip" id="tip" hidden></div></div>
<p class="caption" id="readout" role="status"></p>
<section id="curves" aria-label="The layer's curves" hidden>
<div class="layer"><h2 id="layer-name"></h2><p id="layer-facts"></p></div>
<p class="legend" id="roles"></p>
<div class="panels" id="panels"></div>
</section>
<h2>Values on the format's grid</h2>
<p class="caption">How many of a captured tensor's nonzeros have which magnitude, and where the format under its scale
can put them: the strokes along the axis are the values that its codes stand for.</p>
<div class="controls"><label id="histogram-label">Captured tensor<select id="histogram"></select></label></div>
<p class="about" id="histogram-about"></p>
<div class="plot short"><div id="grid">$histogram</div></div>
</main>
<script type="application/json" id="data">$data</script>
<script>$plotly</script>
<script>
$script
</script>
"""

PAGE = page_template("octavo doctor: $title", style=STYLE, body=BODY)

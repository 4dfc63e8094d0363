// Every page's script: draws the figures, again if the system changes between light and dark.
"use strict";
const config = { displayModeBar: false, responsive: true };
const scheme = matchMedia("(prefers-color-scheme: dark)");

// Plotly knows no CSS variables: replace var(--name), under keys that hold colours, by the value of the current scheme.
function coloured(value, key = "") {
  if (typeof value === "string") return key.includes("color") ? value.replace(/var\((--[\w-]+)\)/g, currentColour) : value;
  if (Array.isArray(value)) return value.map((item) => coloured(item, key));
  if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, coloured(item, name)]));
}

const currentColour = (_, name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const draw = (place, data, layout) => Plotly.react(place, coloured(data), coloured(layout), config);

function drawFigures() {
  for (const place of document.querySelectorAll("[data-figure]")) {
    const { data, layout } = JSON.parse(place.dataset.figure);
    draw(place, data, layout);
  }
}

if (window.Plotly) {
  drawFigures();
  scheme.addEventListener("change", drawFigures);
} else {
  document.documentElement.classList.add("without-figures");
  document.getElementById("without").hidden = false;
}

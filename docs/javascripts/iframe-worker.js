// A page opened from disk may start no web worker: its search runs the worker's script in a hidden frame instead, which
// begins when the reader enters the search, since it makes its index on the page's own thread.
if (location.protocol === "file:") {
  const searched = new Promise(resolve =>
    addEventListener("focusin", event => event.target.matches(".md-search__input") && resolve())
  )

  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.inside = searched.then(() => this.start(url))
    }

    start(url) {
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html><title>search</title>"
      return new Promise(started => {
        frame.onload = () => {
          const inside = frame.contentWindow
          const script = inside.document.createElement("script")
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          script.src = url
          script.onload = () => started(inside)
          inside.document.head.append(script)
        }
        document.body.append(frame)
      })
    }

    async postMessage(data) {
      const inside = await this.inside
      inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }
  }
}

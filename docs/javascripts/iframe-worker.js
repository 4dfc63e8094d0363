// A page opened from disk may start no web worker: its search runs the worker's script in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html><title>search</title>"
      this.inside = new Promise(started => {
        frame.onload = () => {
          const inside = frame.contentWindow
          const script = inside.document.createElement("script")
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          script.src = url
          script.onload = () => started(inside)
          inside.document.head.append(script)
        }
      })
      document.body.append(frame)
    }

    async postMessage(data) {
      const inside = await this.inside
      inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }
  }
}

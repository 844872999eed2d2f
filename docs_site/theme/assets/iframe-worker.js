// Browsers start no worker from file://.  There, the search runs in a hidden frame of the page instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      this.ready = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = resolve;
        inside.postMessage = (data) => {
          const message = new MessageEvent("message", { data });
          this.dispatchEvent(message);
          if (this.onmessage) this.onmessage(message);
        };
        inside.document.body.appendChild(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => {
        const inside = this.frame.contentWindow;
        inside.dispatchEvent(new MessageEvent("message", { data }));
      });
    }
    terminate() {
      this.frame.remove();
    }
  };
}

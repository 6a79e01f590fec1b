/* Dash calls functions of a namespace that must be there before modules are: each of these waits for them. */
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.recycle = new Proxy({}, {
  get: (_, name) => (...values) => {
    const context = window.dash_clientside.callback_context;
    return import("viz/main.js").then(({ callbacks }) => callbacks[name](context, ...values));
  },
});

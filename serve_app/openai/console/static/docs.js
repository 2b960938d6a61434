// Swagger UI with the key that was typed into the console in this tab.

SwaggerUIBundle({
  url: new URL("openapi.json", document.baseURI).href,
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
  requestInterceptor: (request) => {
    const key = sessionStorage.getItem("eesd-key");
    if (key) request.headers.Authorization ??= `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
    return request;
  },
});

"use strict";

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function typeOf(schema) {
  if (schema.oneOf) return schema.oneOf.map(typeOf).join(" or ");
  if (schema.enum) return schema.enum.join(" or ");
  if (schema.type === "array") return schema.items ? `list of ${typeOf(schema.items)}` : "list";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  return schema.type || "";
}

function tableOf(title, schema) {
  const rows = Object.entries(schema.properties || {}).map(([name, field]) => {
    const isNeeded = (schema.required || []).includes(name);
    const about = [field.description, field.default !== undefined ? `Default: ${field.default}.` : "",
      field.maximum !== undefined ? `At most ${field.maximum}.` : ""].filter(Boolean).join(" ");
    return element("tr", "", element("td", "", element("code", name), isNeeded ? " *" : ""), element("td", typeOf(field)), element("td", about));
  });
  if (!rows.length) return [];
  const head = element("tr", "", ...[title, "Type", "About"].map((text) => {
    const cell = element("th", text);
    cell.scope = "col";
    return cell;
  }));
  return [element("table", "", element("thead", "", head), element("tbody", "", ...rows))];
}

async function start() {
  const spec = await (await fetch("spec")).json();
  const base = new URL(".", location.href).href;
  document.getElementById("curl").textContent =
    `curl ${base}translate -H 'Content-Type: application/json' \\\n  -d '{"q": "...", "source": "auto", "target": "..."}'`;
  const sections = Object.entries(spec.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, one]) => {
      const request = one.requestBody?.content["application/json"].schema;
      const answer = one.responses["200"].content?.["application/json"]?.schema;
      const errors = Object.entries(one.responses).filter(([status]) => status !== "200");
      return element("section", "",
        element("h2", "", element("code", `${method.toUpperCase()} ${path}`)),
        element("p", `${one.summary}.`),
        ...(request ? tableOf("Field", request) : []),
        ...(answer ? tableOf("Answer", answer) : []),
        ...(errors.length ? [element("p", `Errors: ${errors.map(([status, each]) => `${status} ${each.description}`).join(" ")}`)] : []));
    }));
  document.getElementById("paths").replaceChildren(...sections);
}

start();

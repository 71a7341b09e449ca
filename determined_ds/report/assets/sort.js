function sortable(root) {
  for (const table of root.querySelectorAll("table:not(.plain)")) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    const sort = (head, column) => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      const value = (row) => (row.cells[column] ? row.cells[column].dataset.value : undefined);
      const compare = (a, b) => {
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        const order = isNaN(a) || isNaN(b) ? String(a).localeCompare(b, "en", { numeric: true }) : a - b;
        return up ? order : -order;
      };
      body.append(...[...body.rows].sort((one, other) => compare(value(one), value(other))));
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
    };
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = (head.title ? head.title + "; click" : "click") + " to sort";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(head, column));
      head.append(button);
    });
  }
}
sortable(document);

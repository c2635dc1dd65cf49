// Runs functions of the chat page without a browser: node page_scripts.js FILE EXPRESSION < JSON of a list > JSON of results.
// EXPRESSION is a function of one input; the file's own names are in scope.
const fs = require("node:fs");
const vm = require("node:vm");

const [file, expression] = process.argv.slice(2);
const call = vm.runInNewContext(fs.readFileSync(file, "utf-8") + "\n;(" + expression + ")", {});
const inputs = JSON.parse(fs.readFileSync(0, "utf-8"));
process.stdout.write(JSON.stringify(inputs.map((input) => call(input))));

//! Generates parts of the reference pages from the command line definition and the API's description.

use std::collections::BTreeSet;
use std::fmt::Write;

use clap::{Arg, ArgAction, Command};
use serde_json::Value;

use crate::sections::{FURTHER, STATUSES};
use crate::{Code, examples};
use api::ErrorCode;

/// Reference page of the tool.
const PAGE: &str = "docs/reference/mediatorctl.md";
/// Reference page of the API.
const API_PAGE: &str = "docs/reference/api.md";
/// Machine-readable description of the API.
const API_DOCUMENT: &str = "docs/reference/api.json";
/// Maximum width of the command list, in columns.
const WIDTH: usize = 118;

/// Wraps a text at [`WIDTH`] columns, with an indentation of `first` spaces on the first line and `next` spaces on the
/// others.
fn wrapped(words: impl IntoIterator<Item = String>, first: usize, next: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut().filter(|line| line.chars().count() + 1 + word.chars().count() <= WIDTH) {
            Some(line) => *line = format!("{line} {word}"),
            None => lines.push(format!("{}{word}", " ".repeat(if lines.is_empty() { first } else { next }))),
        }
    }
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Returns the placeholder of an argument's value.
fn value(arg: &Arg) -> String {
    let choices: Vec<String> = arg.get_possible_values().iter().map(|one| one.get_name().to_owned()).collect();
    if !choices.is_empty() {
        return choices.join("|");
    }
    let name = arg.get_value_names().and_then(|names| names.first());
    name.map_or_else(|| arg.get_id().as_str().to_uppercase(), ToString::to_string)
}

/// Formats an argument as in its command's usage line.
fn usage(arg: &Arg) -> String {
    let is_list = arg.get_num_args().is_some_and(|range| range.max_values() > 1)
        || (matches!(arg.get_action(), ArgAction::Append) && !arg.is_positional());
    let repeats = if is_list { "..." } else { "" };
    if arg.is_positional() {
        let name = if arg.is_last_set() { format!("-- {}", value(arg)) } else { value(arg) };
        return if arg.is_required_set() { format!("{name}{repeats}") } else { format!("[{name}]{repeats}") };
    }
    let name = match (arg.get_short(), arg.get_long()) {
        (Some(short), _) => format!("-{short}"),
        (None, Some(long)) => format!("--{long}"),
        (None, None) => String::new(),
    };
    let shown = match arg.get_num_args().is_some_and(|range| range.takes_values()) {
        true if arg.is_require_equals_set() => format!("{name}[={}]", value(arg)),
        true => format!("{name} {}", value(arg)),
        false => name,
    };
    if arg.is_required_set() { format!("{shown}{repeats}") } else { format!("[{shown}]{repeats}") }
}

/// Appends a command to the list, or all of its subcommands if it has any.
fn add(command: &Command, path: &str, text: &mut String) {
    let mut inner =
        command.get_subcommands().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help").peekable();
    if inner.peek().is_some() {
        for inner in inner {
            add(inner, &format!("{path} {}", inner.get_name()), text);
        }
        return;
    }
    let own = |arg: &&Arg| {
        !arg.is_hide_set() && !arg.is_global_set() && !["help", "version"].contains(&arg.get_id().as_str())
    };
    let (named, placed): (Vec<&Arg>, Vec<&Arg>) =
        command.get_arguments().filter(own).partition(|arg| !arg.is_positional());
    // Positional arguments come first, except those after `--`.
    let (last, first): (Vec<&Arg>, Vec<&Arg>) = placed.into_iter().partition(|arg| arg.is_last_set());
    let words = path.split_whitespace().map(str::to_owned);
    let arguments = first.into_iter().chain(named).chain(last).map(usage);
    text.push_str(&wrapped(words.chain(arguments), 0, 8));
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    text.push_str(&wrapped(about.split_whitespace().map(str::to_owned), 4, 4));
}

/// Renders the list of all commands.
fn commands() -> String {
    let mut command = examples::command();
    command.build();
    let global = command.get_arguments().filter(|arg| arg.is_global_set()).map(usage);
    let first = ["mediatorctl".to_owned()].into_iter().chain(global).chain(["COMMAND".to_owned()]);
    let mut text = wrapped(first, 0, 8) + "\n";
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help") {
        add(inner, inner.get_name(), &mut text);
    }
    format!("```\n{text}```\n")
}

/// Renders the table of exit codes.
fn exit_codes() -> String {
    let mut table = "| exit code | meaning |\n|---|---|\n".to_owned();
    for (code, meaning) in STATUSES {
        writeln!(table, "| {} | {meaning} |", code as u8).unwrap();
    }
    for (command, status, meaning) in FURTHER {
        writeln!(table, "| {status}, of `{command}` | {meaning} |").unwrap();
    }
    table
}

/// Renders the table of error codes.
fn error_codes() -> String {
    let mut table = "| `code` | exit code of mediatorctl |\n|---|---|\n".to_owned();
    for code in [
        ErrorCode::Invalid,
        ErrorCode::NotFound,
        ErrorCode::Conflict,
        ErrorCode::Quota,
        ErrorCode::Forbidden,
        ErrorCode::Failed,
    ] {
        let error = api::Error { code, error: String::new(), what_to_do: String::new() };
        let exit: Code = crate::ClientError::from(admin_client::AskError::Refused(error)).exit_code();
        writeln!(table, "| `{}` | {} |", serde_json::to_value(code).unwrap().as_str().unwrap(), exit as u8).unwrap();
    }
    table
}

/// Renders the table of event kinds, with the text of each kind's description.
fn event_kinds() -> String {
    let schema = schemars::schema_for!(api::EventKind);
    let mut table = "| kind | event |\n|---|---|\n".to_owned();
    let mut count = 0;
    for kind in schema.get("oneOf").and_then(Value::as_array).into_iter().flatten() {
        let name = kind["const"].as_str().unwrap();
        writeln!(table, "| `{name}` | {} |", in_one_line(kind)).unwrap();
        count += 1;
    }
    assert_eq!(count, api::EventKind::ALL.len());
    table
}

/// Returns a description on one line, for a table cell.
fn in_one_line(schema: &Value) -> String {
    let text = schema["description"].as_str().unwrap_or_default().replace('|', "\\|");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns a link to a type's section.
fn link(schema: &Value) -> Option<String> {
    let name = schema["$ref"].as_str()?.rsplit('/').next()?;
    Some(format!("[{name}](#{})", name.to_lowercase()))
}

/// Describes the type of a value in words.
fn kind(schema: &Value) -> String {
    if let Some(link) = link(schema) {
        return link;
    }
    for key in ["allOf", "anyOf", "oneOf"] {
        let parts: Vec<String> =
            schema[key].as_array().into_iter().flatten().map(kind).filter(|one| one != "null").collect();
        if !parts.is_empty() {
            return parts.join(" or ");
        }
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().filter(|one| !one.is_null()).map(|one| format!("`{one}`")).collect::<Vec<_>>().join(", ");
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).filter(|one| *one != "null").collect(),
        one => one.as_str().into_iter().collect(),
    };
    match types[..] {
        ["array"] => format!("list of {}", kind(&schema["items"])),
        ["object"] if schema["additionalProperties"].is_object() => {
            format!("object of {}", kind(&schema["additionalProperties"]))
        }
        [] => "any".to_owned(),
        _ => types.join(" or "),
    }
}

/// Returns the type of a request or response body.
fn body(content: &Value) -> String {
    let Some((media, described)) = content.as_object().and_then(|content| content.iter().next()) else {
        return String::new();
    };
    if media == "application/json" { kind(&described["schema"]) } else { format!("`{media}`") }
}

/// Renders the reference page of the API.
fn api_page() -> String {
    let document = api::schema::document();
    let mut page = "# The admin API\n\n\
        This page is made from the API's description (`cargo xtask docs`), which `mediatorctl schema` and `GET /v1/schema` print\n\
        as an OpenAPI document: [api.json](api.json). [mediatorctl.md](mediatorctl.md#the-api) describes how to use the API.\n\n\
        ## Requests\n\n| request | meaning | body | answer |\n|---|---|---|---|\n"
        .to_owned();
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let query: Vec<&str> = operation["parameters"]
                .as_array()
                .into_iter()
                .flatten()
                .filter(|parameter| parameter["in"] == "query")
                .filter_map(|parameter| parameter["name"].as_str())
                .collect();
            let query = if query.is_empty() { String::new() } else { format!("?{}", query.join("&")) };
            let responses = operation["responses"].as_object().unwrap();
            let (status, good) = responses.iter().find(|(status, _)| status.starts_with('2')).unwrap();
            let answer = match body(&good["content"]) {
                none if none.is_empty() => status.clone(),
                answer => answer,
            };
            let meaning = operation["summary"].as_str().unwrap().replace('|', "\\|");
            let (method, asked) = (method.to_uppercase(), body(&operation["requestBody"]["content"]));
            writeln!(page, "| `{method} {path}{query}` | {meaning} | {asked} | {answer} |").unwrap();
        }
    }
    page.push_str("\n## Types\n");
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        write!(page, "\n### {name}\n\n{}\n", in_one_line(schema)).unwrap();
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let Some(properties) = schema["properties"].as_object().filter(|all| !all.is_empty()) else {
            write!(page, "\nType: {}\n", kind(schema)).unwrap();
            continue;
        };
        page.push_str("\n| key | type | meaning |\n|---|---|---|\n");
        for (key, property) in properties {
            let optional = if required.contains(&key.as_str()) { "" } else { ", optional" };
            writeln!(page, "| `{key}` | {}{optional} | {} |", kind(property), in_one_line(property)).unwrap();
        }
    }
    page
}

#[test]
fn generated_commands_codes_and_events_are_in_the_page() {
    doc_pages::part(PAGE, "commands", &commands());
    doc_pages::part(PAGE, "exit codes", &exit_codes());
    doc_pages::part(PAGE, "events", &event_kinds());
    doc_pages::part(PAGE, "codes of errors", &error_codes());
}

#[test]
fn generated_pages_of_the_api_are_committed() {
    doc_pages::file(API_DOCUMENT, &crate::json(&api::schema::document()));
    doc_pages::file(API_PAGE, &api_page());
}

/// Collects the long options of a command and its subcommands.
fn options(command: &Command, known: &mut BTreeSet<String>) {
    known.extend(command.get_arguments().filter_map(|arg| arg.get_long().map(str::to_owned)));
    command.get_subcommands().for_each(|inner| options(inner, known));
}

#[test]
fn texts_of_the_page_name_options_that_exist() {
    let page = include_str!("../../../../docs/reference/mediatorctl.md");
    let mut known = BTreeSet::new();
    let mut command = examples::command();
    command.build();
    options(&command, &mut known);
    // The examples use these options of curl and podman.
    known.extend(["unix-socket", "device"].map(str::to_owned));
    for part in page.split("--").skip(1) {
        let end = part.find(|c: char| !c.is_ascii_lowercase() && c != '-').unwrap_or(part.len());
        let name = part[..end].trim_end_matches('-');
        assert!(name.is_empty() || known.contains(name), "--{name} in {PAGE}");
    }
}

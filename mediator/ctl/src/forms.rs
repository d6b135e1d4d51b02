//! Output formats: tables for people, and the API's responses as JSON, YAML and CSV.

use std::borrow::Cow;
use std::collections::BTreeSet;

use clap::ValueEnum;
use serde_json::Value;

use admin_client::terminal;

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Form {
    /// Text for people
    Table,
    /// Table with more columns, for lists of VMs, tenants and cards
    Wide,
    /// API response as JSON
    Json,
    /// API response as YAML
    Yaml,
    /// API response as CSV: a header, and a line for each object of a list
    Csv,
}

impl Form {
    /// Escapes a response for output. It may contain words chosen by programs or guests, which must not act as terminal
    /// commands.
    pub fn shown(self, text: &str) -> Cow<'_, str> {
        match self {
            Self::Json => terminal::json(text),
            Self::Table | Self::Wide | Self::Yaml | Self::Csv => terminal::lines(text),
        }
    }

    /// Returns true if the format is a table.
    pub fn is_table(self) -> bool {
        matches!(self, Self::Table | Self::Wide)
    }

    /// Renders a response in this format.
    pub fn render<T: serde::Serialize>(self, answer: &T, table: impl FnOnce(&T) -> String) -> String {
        self.render_wide(answer, |answer, _| table(answer))
    }

    /// Like [`Self::render`], for a table that has more columns in the wide format.
    pub(super) fn render_wide<T: serde::Serialize>(self, answer: &T, table: impl FnOnce(&T, bool) -> String) -> String {
        match self {
            Self::Table => table(answer, false),
            Self::Wide => table(answer, true),
            Self::Json => json(answer),
            Self::Yaml => yaml(answer),
            Self::Csv => csv(answer),
        }
    }
}

pub(super) fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).map_or_else(|error| error.to_string(), |text| text + "\n")
}

pub(super) fn yaml(value: &impl serde::Serialize) -> String {
    let text = serde_saphyr::to_string(value).unwrap_or_else(|error| error.to_string());
    if text.ends_with('\n') { text } else { text + "\n" }
}

/// Returns a response's rows: the objects of its only list, or the response itself.
fn rows(answer: Value) -> Vec<Value> {
    match answer {
        Value::Object(mut keys) if keys.len() == 1 && keys.values().all(Value::is_array) => {
            let list = keys.values_mut().next().map(Value::take);
            list.and_then(|list| if let Value::Array(rows) = list { Some(rows) } else { None }).unwrap_or_default()
        }
        Value::Array(rows) => rows,
        other => vec![other],
    }
}

/// Adds the cells of a row. Members of objects become columns `name.key`, and lists stay JSON.
fn cells(name: &str, value: Value, to: &mut Vec<(String, String)>) {
    match value {
        Value::Object(keys) => {
            for (key, value) in keys {
                let name = if name.is_empty() { key } else { format!("{name}.{key}") };
                cells(&name, value, to);
            }
        }
        Value::Null => to.push((name.to_owned(), String::new())),
        Value::String(text) => to.push((name.to_owned(), text)),
        Value::Array(list) if list.is_empty() => to.push((name.to_owned(), String::new())),
        other => to.push((name.to_owned(), other.to_string())),
    }
}

pub(super) fn csv(answer: &impl serde::Serialize) -> String {
    let written = || -> Result<String, String> {
        let answer = serde_json::to_value(answer).map_err(|error| error.to_string())?;
        let rows: Vec<Vec<(String, String)>> = rows(answer)
            .into_iter()
            .map(|row| {
                let mut row_cells = Vec::new();
                cells("", row, &mut row_cells);
                row_cells
            })
            .collect();
        // Optional keys of later rows also become columns, after the keys of the first row.
        let (mut names, mut known) = (Vec::new(), BTreeSet::new());
        for (name, _) in rows.iter().flatten() {
            if known.insert(name.as_str()) {
                names.push(name.as_str());
            }
        }
        let mut writer = ::csv::Writer::from_writer(Vec::new());
        if !names.is_empty() {
            writer.write_record(&names).map_err(|error| error.to_string())?;
        }
        for row in &rows {
            let cell = |name: &&str| row.iter().find(|(key, _)| key == name).map_or("", |(_, text)| text.as_str());
            writer.write_record(names.iter().map(cell)).map_err(|error| error.to_string())?;
        }
        let bytes = writer.into_inner().map_err(|error| error.to_string())?;
        String::from_utf8(bytes).map_err(|error| error.to_string())
    };
    written().unwrap_or_else(|error| error + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn csv_of_a_list_has_a_line_for_each_object() {
        let list = json!({ "vms": [
            { "name": "a", "ram": { "lent_bytes": 5 }, "denied": [] },
            { "name": "b, \"c\"\nd", "ram": { "lent_bytes": 6 }, "denied": [{ "n": 1 }], "error": "x" },
        ] });
        assert_eq!(
            Form::Csv.render(&list, |_| unreachable!()),
            "denied,name,ram.lent_bytes,error\n,a,5,\n\"[{\"\"n\"\":1}]\",\"b, \"\"c\"\"\nd\",6,x\n"
        );
        assert_eq!(Form::Csv.render(&json!({ "vms": [] }), |_| unreachable!()), "");
        assert_eq!(Form::Csv.render(&json!({ "removed": "a" }), |_| unreachable!()), "removed\na\n");
    }

    #[test]
    fn yaml_of_an_answer_is_read_back_unchanged() {
        let answer =
            json!({ "vms": [{ "name": "yes", "error": null, "uid": "007", "text": "a: b\n# c", "n": 5 }], "on": true });
        let text = Form::Yaml.render(&answer, |_| unreachable!());
        assert_eq!(serde_saphyr::from_str::<Value>(&text).unwrap(), answer, "{text}");
    }

    #[test]
    fn wide_form_is_a_table_with_the_flag() {
        let shown = |form: Form| form.render_wide(&(), |(), wide| wide.to_string());
        assert_eq!((shown(Form::Table), shown(Form::Wide)), ("false".to_owned(), "true".to_owned()));
    }
}

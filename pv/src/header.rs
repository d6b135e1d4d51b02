//! Generates the C header of [`crate::abi`] for the guest's kernel module.

use crate::abi::{
    BODIES, HEADERS, SECTION, STATUSES, feature, kind, op, query, register,
    share::{self, control, mode},
    status,
};
use crate::section::{Section, Structure};
use std::fmt::Write;

const SECTIONS: [&Section; 11] = [
    &SECTION,
    &feature::SECTION,
    &register::SECTION,
    &status::SECTION,
    &STATUSES,
    &kind::SECTION,
    &op::SECTION,
    &share::SECTION,
    &mode::SECTION,
    &control::SECTION,
    &query::SECTION,
];

/// Maximum width of comments in columns.
const MAX_COLUMNS: usize = 100;

/// Returns the text of the header.
#[must_use]
pub fn header() -> String {
    let mut text = String::from(concat!(
        "// SPDX-License-Identifier: GPL-2.0-only OR MIT\n",
        "/*\n",
        " * Interface between a guest driver and gpu-mediator. Generated from pv/src/abi.rs by\n",
        " *   cargo run -p pv --example header\n",
        "  * docs/design/paravirtual.md describes its use.\n",
        " */\n",
        "#ifndef GPU_MEDIATOR_ABI_H\n",
        "#define GPU_MEDIATOR_ABI_H\n\n",
        "#include <linux/types.h>\n",
    ));
    for section in SECTIONS {
        text.push('\n');
        if !section.doc.is_empty() {
            let around = section.module().rsplit_once("::").map_or("", |(around, _)| around);
            comment(&mut text, "", &sentence(section.doc, around));
            text.push('\n');
        }
        for constant in section.constants {
            comment(&mut text, "", &sentence(constant.doc, section.module()));
            let suffix = if constant.bytes == 8 { "ULL" } else { "" };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "#define {} {:#x}{suffix}", section.c_name(constant.name), constant.value);
        }
    }
    for structure in HEADERS.iter().chain(BODIES) {
        text.push('\n');
        comment(&mut text, "", &sentence(structure.doc, ""));
        let name = structure.c_name();
        let _ = writeln!(text, "{name} {{");
        for field in structure.fields {
            comment(&mut text, "\t", &sentence(field.doc, ""));
            let _ = writeln!(text, "\t{} {};", c_type(field.ty), field.name);
        }
        let _ = writeln!(text, "}};\n_Static_assert(sizeof({name}) == {}, \"{name}\");", structure.bytes);
    }
    text.push_str("\n#endif\n");
    text
}

impl Section {
    /// Returns the path of the section below [`crate::abi`].
    fn module(&self) -> &'static str {
        let path = self.path.strip_prefix("pv::abi").unwrap_or(self.path);
        path.strip_prefix("::").unwrap_or(path)
    }

    /// Returns the prefix of C names in the section.
    fn prefix(&self) -> String {
        match self.module() {
            "" => "GMPV_".to_owned(),
            // Avoid a conflict with the register of the same name.
            "Status" => "GMPV_RESULT_".to_owned(),
            module => format!("GMPV_{}_", module.replace("::", "_").to_uppercase()),
        }
    }

    fn c_name(&self, name: &str) -> String {
        self.prefix() + &snake(name).to_uppercase()
    }
}

impl Structure {
    fn c_name(&self) -> String {
        format!("struct gmpv_{}", snake(self.name))
    }
}

/// Converts camel case to snake case. Does not change upper-case names.
fn snake(name: &str) -> String {
    if !name.contains(char::is_lowercase) {
        return name.to_owned();
    }
    let mut snake = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
    }
    snake
}

fn c_type(ty: &str) -> &'static str {
    match ty {
        "u8" => "__u8",
        "u16" => "__le16",
        // The kernel has no signed little-endian type. Signed numbers use two's complement.
        "u32" | "i32" => "__le32",
        _ => "__le64",
    }
}

/// Returns the first sentence of a doc comment in `module`, with its links converted to C names.
fn sentence(doc: &[&str], module: &str) -> String {
    let text = doc.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    let end = text.find(". ").map_or(text.len(), |at| at.saturating_add(1));
    let mut left = text.get(..end).unwrap_or_default();
    let mut plain = String::new();
    while let Some((before, link)) = left.split_once("[`") {
        plain.push_str(before);
        let (name, rest) = link.split_once("`]").unwrap_or((link, ""));
        let target = rest.strip_prefix('(').and_then(|rest| rest.split_once(')'));
        let (path, rest) = target.unwrap_or((name, rest));
        plain.push_str(&resolve(path, module).unwrap_or_else(|| name.to_owned()));
        left = rest;
    }
    plain.push_str(left);
    plain
}

/// Returns the C name of `path` in `module`.
fn resolve(path: &str, module: &str) -> Option<String> {
    let mut module: Vec<_> = module.split("::").filter(|part| !part.is_empty()).collect();
    let mut path = path;
    while let Some(rest) = path.strip_prefix("super::") {
        module.pop();
        path = rest;
    }
    module.push(path);
    let path = module.join("::");
    let (parent, name) = path.rsplit_once("::").unwrap_or(("", &path));
    let constant = |section: &&Section| section.module() == parent && section.constants.iter().any(|c| c.name == name);
    if let Some(section) = SECTIONS.into_iter().find(constant) {
        return Some(section.c_name(name));
    }
    if let Some(section) = SECTIONS.into_iter().find(|section| section.module() == path) {
        return Some(section.prefix() + "*");
    }
    let structure = |name: &str| HEADERS.iter().chain(BODIES).find(|structure| structure.name == name);
    let field = structure(parent).filter(|s| s.fields.iter().any(|field| field.name == name));
    structure(&path).map(Structure::c_name).or_else(|| field.map(|s| format!("{name} of {}", s.c_name())))
}

/// Appends `words` as a C comment.
fn comment(text: &mut String, indent: &str, words: &str) {
    if words.len().saturating_add("/*  */".len()) <= MAX_COLUMNS {
        let _ = writeln!(text, "{indent}/* {words} */");
        return;
    }
    let _ = write!(text, "{indent}/*\n{indent} *");
    let mut column = 0usize;
    for word in words.split(' ') {
        column = column.saturating_add(word.len()).saturating_add(1);
        if column > MAX_COLUMNS {
            let _ = write!(text, "\n{indent} *");
            column = word.len();
        }
        let _ = write!(text, " {word}");
    }
    let _ = writeln!(text, "\n{indent} */");
}

#[cfg(test)]
mod tests;

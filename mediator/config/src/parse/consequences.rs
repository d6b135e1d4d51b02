//! Determines which broken rules may be mere consequences of an error that the parser has found.

use super::super::check::Mistake;
use super::super::check::place::NO_ROOM;
use super::super::cuda::TOO_FEW;

/// Keys that affect size checks, both in their own table and, through the amount left for other objects, in other
/// tables.
const AMOUNTS: [&str; 7] = ["vram_mib", "reserve_mib", "chunk_kib", "memory", "overcommit", "cuda", "passthrough"];
/// Keys of `[daemon]` that affect the checks of socket paths.
const SOCKETS: [&str; 3] = ["socket_dir", "admin_socket", "read_socket"];
/// Tables whose objects use a card.
const USERS: [&str; 3] = ["vm", "tenant", "profile"];

/// An error that the parser has found.
pub(super) struct Wrong {
    /// Offset of the value's first byte.
    pub(super) at: usize,
    /// Path of the key, such as `vm[1].vram_mib`.
    pub(super) path: String,
    /// Set if the whole table was omitted because it lacks a key.
    pub(super) table_is_out: bool,
    pub(super) error: toml::de::Error,
}

impl Wrong {
    /// Returns the table's name, its index if there can be several, and the key in the table.
    fn parts(&self) -> (&str, Option<usize>, &str) {
        let (table, field) = self.path.split_once('.').unwrap_or((&self.path, ""));
        match table.strip_suffix(']').and_then(|table| table.split_once('[')) {
            Some((name, index)) => (name, index.parse().ok(), field),
            None => (table, None, field),
        }
    }

    /// Returns true if the key is unknown. The value of an unknown key does not affect any rule.
    fn is_unknown(&self) -> bool {
        self.error.message().starts_with("unknown field")
    }

    /// Returns true if a broken rule may merely be a consequence of this error.
    pub(super) fn affects(&self, mistake: &Mistake) -> bool {
        let (table, index, field) = self.parts();
        let (other, other_field) = (mistake.key.table, mistake.key.field);
        let is_unplaced = [NO_ROOM, TOO_FEW].iter().any(|start| mistake.what.starts_with(start));
        let (of_amounts, of_cards) = (is_amount(other_field) || is_unplaced, ["card", "cards"].contains(&other_field));
        if table == other && index == mistake.key.index {
            // The wrong value was omitted from the check, so rules about the same key or about amounts may only appear
            // to be broken.
            return within(field, other_field)
                || within(other_field, field)
                || (!self.is_unknown() && is_amount(field) && of_amounts);
        }
        if self.is_unknown() {
            return false;
        }
        let both_amounts = is_amount(field) && of_amounts;
        match table {
            "daemon" if SOCKETS.contains(&field) => other_field == "socket",
            "daemon" => field == "placement" && of_cards,
            // The card was omitted, so rules that refer to its name fail.
            "card" if self.table_is_out => USERS.contains(&other) && (of_cards || of_amounts),
            "card" => USERS.contains(&other) && (both_amounts || (field == "drained" && of_cards)),
            "profile" if self.table_is_out => other_field == "profile",
            "profile" => ["vm", "tenant"].contains(&other) && (both_amounts || within(field, other_field)),
            // Objects on one card share its memory.
            "vm" | "tenant" => ["vm", "tenant"].contains(&other) && (both_amounts || (self.table_is_out && of_amounts)),
            _ => false,
        }
    }

    /// Converts a table's index in the parsed text to its index in a text that also contains this error's table, if
    /// that table was omitted.
    fn renumbered(&self, table: &str, index: usize) -> usize {
        match self.parts() {
            (name, Some(own), _) if self.table_is_out && name == table && own <= index => index + 1,
            _ => index,
        }
    }
}

/// Returns true if `inner` is the key `outer` or a key in that table.
fn within(inner: &str, outer: &str) -> bool {
    !outer.is_empty() && inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns true if the size checks use this key, or if the key represents a whole table.
pub(super) fn is_amount(field: &str) -> bool {
    field.is_empty() || AMOUNTS.iter().any(|amount| within(field, amount))
}

/// Changes the table index in an error to the index in the file, because omitted tables were not counted.
pub(super) fn renumber(mistake: &mut Mistake, wrong: &[Wrong]) {
    let Some(mut index) = mistake.key.index else { return };
    let mut out: Vec<&Wrong> = wrong.iter().filter(|wrong| wrong.table_is_out).collect();
    out.sort_by_key(|wrong| wrong.parts().1);
    for wrong in out {
        index = wrong.renumbered(mistake.key.table, index);
    }
    mistake.key.index = Some(index);
}

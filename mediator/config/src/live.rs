//! Keys that can be changed at run time, while their object exists.

/// Nested tables of a `[[vm]]` whose keys can be changed while the virtual machine runs.
const OF_VM: [&str; 2] = ["time", "memory"];
/// Keys and tables of a `[[vm]]` with a `cuda` table that can be changed while the guest's programs run.
const OF_FUNCTION: [&str; 3] = ["time", "memory", "vram_mib"];
/// Keys and tables of a `[[tenant]]` that can be changed while its programs run.
const OF_TENANT: [&str; 7] = ["time", "memory", "vram_mib", "share_group", "sharing", "on_stuck", "on_remove"];
/// Keys and tables of a `[[card]]` that can be changed while the daemon runs.
const OF_CARD: [&str; 3] = ["drained", "scheduler", "memory"];

fn within(key: &str, tables: &[&str]) -> bool {
    tables.iter().any(|table| key.strip_prefix(table).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

/// Returns true if a virtual machine's key, given as a path, can be changed while the virtual machine runs.
#[must_use]
pub fn of_vm(key: &str) -> bool {
    within(key, &OF_VM)
}

/// Returns true if a key of a virtual machine with a `cuda` table, given as a path, can be changed while the guest's
/// programs run.
#[must_use]
pub fn of_function(key: &str) -> bool {
    within(key, &OF_FUNCTION)
}

/// Returns true if a tenant's key, given as a path, can be changed while its programs run.
#[must_use]
pub fn of_tenant(key: &str) -> bool {
    within(key, &OF_TENANT)
}

/// Returns true if a card's key, given as a path, can be changed while the daemon runs.
#[must_use]
pub fn of_card(key: &str) -> bool {
    within(key, &OF_CARD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_by_their_table() {
        assert!(of_tenant("sharing") && of_tenant("on_stuck") && of_tenant("memory.quota_mib") && !of_tenant("card"));
        assert!(of_vm("time.weight") && of_card("scheduler.band.wait_ns") && of_card("drained"));
        assert!(of_tenant("vram_mib") && of_function("vram_mib") && of_function("memory.quota_mib"));
        assert!(!of_function("cuda.window_mib") && !of_function("vram_mib_max") && !of_function("card"));
        assert!(!of_vm("timeout") && !of_vm("vram_mib") && !of_card("time.copy_mib_per_s"));
    }
}

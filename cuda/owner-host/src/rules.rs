//! Converts the daemon's rules for a card to settings.

use cuda_control::{Quanta, Rules};
use vram::QuantaConfig;

/// Returns the settings for time, memory, and memory quanta.
///
/// # Errors
/// Returns an error if a name is unknown.
pub fn rules(rules: &Rules, chunk_bytes: u64) -> Result<(sched::Config, vram::balance::Config, QuantaConfig), String> {
    let Quanta { mode, window_ns, on_permille, margin_permille, factor, min_ns, max_ns } = &rules.quanta;
    let balance = vram::balance::Config {
        policy: rules.victims.parse()?,
        return_interval_ns: rules.return_ns,
        settle_ns: rules.settle_ns,
        idle_after_ns: rules.idle_ns,
        low_water: u32::try_from(rules.low_water_bytes / chunk_bytes.max(1)).unwrap_or(u32::MAX),
        ..vram::balance::Config::default()
    };
    let quanta = QuantaConfig {
        mode: mode.parse()?,
        window_ns: *window_ns,
        on_permille: *on_permille,
        margin_permille: *margin_permille,
        factor: *factor,
        min_ns: *min_ns,
        max_ns: *max_ns,
    };
    Ok((rules.scheduler, balance, quanta))
}

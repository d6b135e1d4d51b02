//! The tables' indices in this crate, and their UUIDs.

/// Number of tables.
pub const COUNT: usize = 7;
/// Index of the table with the runtime's functions.
pub const RUNTIME: usize = 0;
/// Index of the table with buffers for tools' callbacks.
pub const HOOKS: usize = 1;
/// Index of the table that returns the current context to tools and cuBLASLt.
pub const TOOLS: usize = 2;
/// Index of the context store's table.
pub const STORE: usize = 3;
/// Index of the table with the runtime's integrity query.
pub const INTEGRITY: usize = 4;
/// Index of the table of launch checks.
pub const CHECKS: usize = 5;
/// Index of the context ID table. The initialization of the CUDA 13.5 runtime requires this table, but does not call
/// any of its slots.
pub const IDENTITIES: usize = 6;

/// The UUID of each table.
pub const NAMES: [(&str, u128); COUNT] = [
    ("6BD5FB6C-5BF4-E74A-8987-D93912FD9DF9", 0x6BD5_FB6C_5BF4_E74A_8987_D939_12FD_9DF9),
    ("A094798C-2E74-2E74-93F2-0800200C0A66", 0xA094_798C_2E74_2E74_93F2_0800_200C_0A66),
    ("42D85A81-23F6-CB47-8298-F6E78A3AECDC", 0x42D8_5A81_23F6_CB47_8298_F6E7_8A3A_ECDC),
    ("C693336E-1121-DF11-A8C3-68F355D89593", 0xC693_336E_1121_DF11_A8C3_68F3_55D8_9593),
    ("D4082055-BDE6-704B-8D34-BA123C66E1F2", 0xD408_2055_BDE6_704B_8D34_BA12_3C66_E1F2),
    ("263E8860-7CD2-6143-92F6-BBD5006DFA7E", 0x263E_8860_7CD2_6143_92F6_BBD5_006D_FA7E),
    ("21318C60-9714-3248-8CA6-41FF7324C8F2", 0x2131_8C60_9714_3248_8CA6_41FF_7324_C8F2),
];

/// The UUID of the runtime's table.
pub const RUNTIME_UUID: [u8; 16] = NAMES[RUNTIME].1.to_be_bytes();
/// The UUID of the table of the integrity query.
pub const INTEGRITY_UUID: [u8; 16] = NAMES[INTEGRITY].1.to_be_bytes();

/// Returns a table's UUID as text.
pub fn name(table: usize) -> &'static str {
    NAMES.get(table).map_or("unknown", |(name, _)| name)
}

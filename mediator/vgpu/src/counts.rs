//! Counters of events. One declaration defines a counter's field, its description, and its name for operators. `cargo
//! xtask check` rejects a counter that is never incremented.

/// Declares a struct of counters. Each field has a doc line and the name of its metric.
macro_rules! counts {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])+ $field:ident: $metric:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default)]
        pub(crate) struct $name {
            $($(#[$doc])+ pub(crate) $field: u64,)+
        }

        impl $name {
            /// Returns all counters with the names that operators see.
            pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$(($metric, self.$field)),+].into_iter()
            }

            /// Restores the counters for which `value_of` returns a value. All others are 0.
            #[allow(dead_code, reason = "not all counts continue in another process")]
            pub(crate) fn restore(value_of: impl Fn(&str) -> Option<u64>) -> Self {
                Self { $($field: value_of($metric).unwrap_or(0)),+ }
            }
        }
    };
}

pub(crate) use counts;

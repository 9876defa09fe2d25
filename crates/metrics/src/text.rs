//! The text forms: OpenMetrics 1.0, and Prometheus' own, which is older.
//!
//! They differ in whether the family of a counter is called as its samples are, and in how a page ends.

use std::fmt::Write;

/// Which form a page has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4.
    Plain,
}

impl Form {
    /// The form a client that sent this `Accept` header is best given.
    pub fn accepted(accept: Option<&str>) -> Form {
        match accept {
            Some(accept) if accept.contains("application/openmetrics-text") => Form::OpenMetrics,
            _ => Form::Plain,
        }
    }

    /// What the page is, for `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Form::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Form::Plain => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// How a page of OpenMetrics ends.
const END: &str = "# EOF\n";

/// What a family's values mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
    /// Counts of values up to limits.
    Histogram,
}

/// A page that is being written.
pub(crate) struct Page {
    form: Form,
    out: String,
    family: &'static str,
    kind: Kind,
}

/// Backslashes, quotes and line ends of a label's value have to be told.
fn escaped(out: &mut String, value: &str) {
    for c in value.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
    }
}

impl Page {
    pub(crate) fn new(form: Form) -> Page {
        Page {
            form,
            out: String::new(),
            family: "",
            kind: Kind::Gauge,
        }
    }

    /// Goes on with a page that had been ended.
    pub(crate) fn continued(form: Form, page: String) -> Page {
        let out = match page.strip_suffix(END) {
            Some(body) => body.to_owned(),
            None => page,
        };
        Page {
            out,
            ..Page::new(form)
        }
    }

    /// Begins a family. A counter's name is given without `_total`.
    pub(crate) fn family(&mut self, name: &'static str, kind: Kind, help: &str) {
        (self.family, self.kind) = (name, kind);
        let of = match (kind, self.form) {
            (Kind::Counter, Form::Plain) => "_total",
            _ => "",
        };
        let word = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let _ = writeln!(self.out, "# HELP {name}{of} {help}");
        let _ = writeln!(self.out, "# TYPE {name}{of} {word}");
    }

    /// A value of the family begun last.
    pub(crate) fn value(&mut self, labels: &[(&str, &str)], value: f64) {
        let suffix = match self.kind {
            Kind::Counter => "_total",
            Kind::Gauge | Kind::Histogram => "",
        };
        self.sample(suffix, labels, value);
    }

    /// A value with a suffix of its own.
    pub(crate) fn sample(&mut self, suffix: &str, labels: &[(&str, &str)], value: f64) {
        self.out.push_str(self.family);
        self.out.push_str(suffix);
        for (at, (name, value)) in labels.iter().enumerate() {
            self.out.push(if at == 0 { '{' } else { ',' });
            self.out.push_str(name);
            self.out.push_str("=\"");
            escaped(&mut self.out, value);
            self.out.push('"');
        }
        if !labels.is_empty() {
            self.out.push('}');
        }
        // Integers come out as such.
        let _ = writeln!(self.out, " {value}");
    }

    pub(crate) fn end(mut self) -> String {
        if self.form == Form::OpenMetrics {
            self.out.push_str(END);
        }
        self.out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counter(form: Form) -> String {
        let mut page = Page::new(form);
        page.family("a_bytes", Kind::Counter, "Bytes.");
        page.value(&[("disk", "a\\b\"c\nd")], 3e15);
        page.family("b", Kind::Gauge, "A ratio.");
        page.value(&[], 0.25);
        page.end()
    }

    #[test]
    fn both_forms() {
        assert_eq!(
            counter(Form::OpenMetrics),
            "# HELP a_bytes Bytes.\n# TYPE a_bytes counter\n\
             a_bytes_total{disk=\"a\\\\b\\\"c\\nd\"} 3000000000000000\n\
             # HELP b A ratio.\n# TYPE b gauge\nb 0.25\n# EOF\n"
        );
        assert_eq!(
            counter(Form::Plain),
            "# HELP a_bytes_total Bytes.\n# TYPE a_bytes_total counter\n\
             a_bytes_total{disk=\"a\\\\b\\\"c\\nd\"} 3000000000000000\n\
             # HELP b A ratio.\n# TYPE b gauge\nb 0.25\n"
        );
    }

    #[test]
    fn who_asks_for_openmetrics_gets_it() {
        let asked = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5";
        assert_eq!(Form::accepted(Some(asked)), Form::OpenMetrics);
        assert_eq!(Form::accepted(Some("*/*")), Form::Plain);
        assert_eq!(Form::accepted(None), Form::Plain);
    }
}

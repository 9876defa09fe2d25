//! Aligned columns for the terminal.

/// Between two columns.
const GAP: usize = 2;
/// A name of fewer characters says nothing.
const LEAST: usize = 8;

/// Rows under headings; columns are as wide as their widest cell.
pub struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// A table with these headings; a heading that begins with `>` aligns its column to the right.
    pub fn new(headings: &[&str]) -> Table {
        let right = headings.iter().map(|h| h.starts_with('>')).collect();
        Table {
            rows: vec![
                headings
                    .iter()
                    .map(|h| h.trim_start_matches('>').to_owned())
                    .collect(),
            ],
            right,
        }
    }

    /// Adds a row.
    pub fn row<I: IntoIterator<Item = String>>(&mut self, cells: I) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Cuts what is in the first column until each line has at most `most` characters, as far as that goes.
    pub fn fit(&mut self, most: usize) {
        let others: usize = self.widths().iter().skip(1).map(|width| width + GAP).sum();
        let room = most.saturating_sub(others).max(LEAST);
        for cell in self.rows.iter_mut().filter_map(|row| row.first_mut()) {
            *cell = cut(cell, room);
        }
    }

    fn widths(&self) -> Vec<usize> {
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|r| r.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        (0..self.right.len()).map(width).collect()
    }

    /// The table as text, each line ended.
    pub fn render(&self) -> String {
        let widths = self.widths();
        let mut out = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&self.right) {
                let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
                if *right {
                    line.push_str(&pad);
                    line.push_str(cell);
                } else {
                    line.push_str(cell);
                    line.push_str(&pad);
                }
                line.push_str(&" ".repeat(GAP));
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

/// True for what steers a terminal instead of being shown: control characters, and those that turn the direction of what
/// follows or break a line.
fn steers(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}' | '\u{FEFF}')
}

/// `text` with what would steer the terminal replaced: names and paths come from elsewhere. It is one line.
pub fn plain(text: &str) -> String {
    let shown = |c| if steers(c) { '\u{FFFD}' } else { c };
    text.chars().map(shown).collect()
}

/// The same of several lines.
pub fn shown(text: &str) -> String {
    let shown = |c| match c {
        '\n' | '\t' => c,
        c if steers(c) => '\u{FFFD}',
        c => c,
    };
    text.chars().map(shown).collect()
}

/// JSON with such characters escaped: they stand in its strings alone, which mean the same then.
pub fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\n' => text.push(c),
            // All of them have at most 16 bits.
            c if steers(c) => text.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => text.push(c),
        }
    }
    text
}

/// A value as JSON in one line.
pub fn json<T: serde::Serialize>(value: &T) -> serde_json::Result<String> {
    serde_json::to_string(value).map(|text| escaped(&text))
}

/// `text` if it has at most so many characters, else its beginning.
pub fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(most.saturating_sub(1)).collect();
    short.push('…');
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_steer_no_terminal() {
        let name = "a\u{1b}[31m\u{9b}2J\u{7f}\r\u{202e}gmi.exe\u{2066}\u{feff}\tb\nc ü";
        let one = plain(name);
        assert!(!one.chars().any(steers), "{one:?}");
        assert_eq!(shown(name).replace(['\n', '\t'], "\u{fffd}"), one);
        assert!(one.ends_with("c ü"));
        let text = json(&name).unwrap();
        assert!(!text.chars().any(steers), "{text:?}");
        assert_eq!(serde_json::from_str::<String>(&text).unwrap(), name);
    }

    #[test]
    fn columns_line_up() {
        let mut t = Table::new(&["NAME", ">SIZE"]);
        t.row(["a".to_owned(), "1 GiB".to_owned()]);
        t.row(["größer".to_owned(), "512 B".to_owned()]);
        assert_eq!(t.render(), "NAME     SIZE\na       1 GiB\ngrößer  512 B\n");
    }

    #[test]
    fn long_names_give_way() {
        let mut t = Table::new(&["NAME", ">SIZE"]);
        t.row(["a-very-long-name".to_owned(), "1 GiB".to_owned()]);
        t.fit(17);
        assert_eq!(t.render(), "NAME         SIZE\na-very-lo…  1 GiB\n");
        t.fit(3);
        assert_eq!(t.render(), "NAME       SIZE\na-very-…  1 GiB\n");
        t.fit(usize::MAX);
        assert_eq!(cut("größer", 6), "größer");
        assert_eq!(cut("größer", 3), "gr…");
    }

    #[test]
    fn terminals_are_not_steered() {
        assert_eq!(plain("a\u{1b}[2Jb"), "a\u{FFFD}[2Jb");
    }
}

// text/trec.h -- relevance judgements (qrels), and the measures of a ranking: trec_eval's, as pytrec_eval gives them.
//
//   nDCG@k          = DCG@k / DCG@k of the best order, DCG@k = sum over ranks r <= k of grade_r / log2(r + 1)
//                                                                          Jarvelin and Kekalainen 2002
//   recall@k        = relevant documents among the first k / all relevant documents
//   reciprocal rank = 1 / rank of the first relevant document
//
// A document is relevant if its grade is above 0. Ranks are trec_eval's: by score, and for equal scores the name that
// is greater in byte order comes first.
#pragma once

#include <cmath>
#include <iterator>
#include <sstream>
#include <unordered_map>

#include "../../base/common.h"

using Judgements = std::unordered_map<std::string, int>;        // {document: grade} of one query

struct Qrels {
    std::string path;
    std::unordered_map<std::string, Judgements> queries;        // {query: judgements}
    size_t judgements = 0;                                      // of all queries
};

// TREC's lines "query 0 document grade", separated by white space. The second field is ignored, as in trec_eval.
inline Qrels read_qrels(const std::string& path) {
    Qrels q;
    q.path = path;
    const std::string text = read_file(path, 1u << 30);
    size_t line = 1;
    for (size_t begin = 0; begin < text.size(); line++) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        std::istringstream words(text.substr(begin, end - begin));
        const std::vector<std::string> fields{std::istream_iterator<std::string>(words), {}};
        const std::string count = fields.size() > 4 ? "more than 4" : std::to_string(fields.size());
        check(fields.size() == 4, "%s: line %zu: expected 'query 0 document grade', got %s fields", path.c_str(), line,
              count.c_str());
        const std::string &query = fields[0], &document = fields[2], &word = fields[3];
        char* rest;                         // the part after the number
        errno = 0;                          // ERANGE if the number does not fit
        const long grade = strtol(word.c_str(), &rest, 10);
        const bool whole = rest == word.c_str() + word.size() && errno == 0;
        check(whole && grade >= -1000 && grade <= 1000,
              "%s: line %zu: expected a grade from -1000 to 1000, a whole number, got '%.40s'", path.c_str(), line,
              word.c_str());
        check(q.queries[query].emplace(document, (int)grade).second,
              "%s: line %zu: document %.80s is judged twice for query %.80s", path.c_str(), line, document.c_str(),
              query.c_str());
        q.judgements++;
        begin = end + 1;                    // the last newline may be missing
    }
    check(q.judgements > 0, "%s: the file is empty, expected lines 'query 0 document grade'", path.c_str());
    return q;
}

struct Ranked { float score; std::string document; };

// The grades of the documents found, in trec_eval's order; a document without a judgement has grade 0.
inline std::vector<int> ranked_grades(std::vector<Ranked> found, const Judgements& judgements) {
    std::sort(found.begin(), found.end(), [](const Ranked& a, const Ranked& b) {
        // names differ, so no two are equal and the order is unique
        return a.score > b.score || (a.score == b.score && a.document > b.document);
    });
    std::vector<int> grades;
    for (const Ranked& r : found) {
        const auto judged = judgements.find(r.document);
        grades.push_back(judged == judgements.end() ? 0 : judged->second);
    }
    return grades;
}

// Index r is rank r + 1, hence log2(r + 2). Negative grades count as 0, as in trec_eval.
inline double dcg(const std::vector<int>& grades, int k) {
    double sum = 0.0;
    for (size_t r = 0; r < grades.size() && r < (size_t)k; r++) {
        if (grades[r] > 0) { sum += grades[r] / std::log2((double)r + 2.0); }
    }
    return sum;
}

// how many of the first k are relevant
inline int count_relevant(const std::vector<int>& grades, int k) {
    const auto end = grades.begin() + (long)std::min((size_t)k, grades.size());
    return (int)std::count_if(grades.begin(), end, [](int g) { return g > 0; });
}

// all grades of a query in the best order
inline std::vector<int> all_grades(const Judgements& judgements) {
    std::vector<int> grades;
    for (const auto& j : judgements) { grades.push_back(j.second); }
    std::sort(grades.rbegin(), grades.rend());      // descending
    return grades;
}

// The measures. grades: in the order of the ranks; judgements: of the query. 0 if no document is relevant
inline double ndcg_at(const std::vector<int>& grades, const Judgements& judgements, int k) {
    const double ideal = dcg(all_grades(judgements), k);
    return ideal > 0.0 ? dcg(grades, k) / ideal : 0.0;
}
inline double recall_at(const std::vector<int>& grades, const Judgements& judgements, int k) {
    const int relevant = count_relevant(all_grades(judgements), INT32_MAX);
    return relevant > 0 ? (double)count_relevant(grades, k) / relevant : 0.0;
}
inline double reciprocal_rank(const std::vector<int>& grades) {
    const auto first = std::find_if(grades.begin(), grades.end(), [](int g) { return g > 0; });
    return first == grades.end() ? 0.0 : 1.0 / (double)(first - grades.begin() + 1);
}
